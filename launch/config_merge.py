"""Config files: found by path or packaged name, merged over their bases, overridden by key.

A config with `base: other.yaml` is merged over that file: mappings key by key; lists and values
replace. Where it names another `kind` of a section, nothing of the base's section remains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from sqlenv.errors import UserError

Kinds = Mapping[tuple[str, ...], str]
"""Paths of the sections whose keys depend on their `kind`, each with its default kind."""
_PACKAGED = resources.files("launch") / "configs"


def packaged() -> list[str]:
    """List the names of the configs that come with the project."""
    return sorted(entry.name for entry in _PACKAGED.iterdir() if entry.name.endswith(".yaml"))


def read(name: str, overrides: Sequence[str], kinds: Kinds) -> dict[str, Any]:
    """Read a config by path or packaged name, merge it over its base, and set the overrides; each
    section that names no kind names its default one.
    """
    path = Path(name)
    if not path.is_file() and name not in packaged():
        what = "is a folder" if path.is_dir() else "no such file"
        raise UserError(f"--cfg {name}: {what}, and not one of {', '.join(packaged())}")
    raw = _read(name, path.resolve() if path.is_file() else _PACKAGED / name, kinds)
    for override in overrides:
        dotted, separator, text = override.partition("=")
        if not separator or not dotted:
            raise UserError(f"{override!r}: an override has the form key.sub=value")
        try:
            raw = _set(raw, (), dotted.split("."), yaml.safe_load(text))
        except yaml.YAMLError:
            line = f"{override!r}: the value is not YAML; quote it for the shell"
            raise UserError(line) from None
        except UserError as error:
            raise UserError(f"{override!r}: {error}") from None
    for keys, kind in kinds.items():
        node: Any = raw
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.setdefault("kind", kind)
    return raw


def _read(
    name: str, file: Traversable, kinds: Kinds, above: tuple[Traversable, ...] = ()
) -> dict[str, Any]:
    """Read a config and merge it over its base, which lies beside it or is a packaged one."""
    try:
        raw = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{name}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{name}: a config is a mapping of keys to values")
    if "base" not in raw:
        return raw
    base = raw.pop("base")
    beside = [(file.parent / str(base)).resolve()] if isinstance(file, Path) else []
    found = next((one for one in (*beside, _PACKAGED / str(base)) if one.is_file()), None)
    if found is None:
        raise UserError(f"{name}: base: {base!r} is neither beside it nor a packaged config")
    if found in (file, *above):
        raise UserError(f"{name}: base: {base} is based on this file; name another config")
    return merge(_read(base, found, kinds, (file, *above)), raw, kinds)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice; PyYAML takes the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        keys = [key.value for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                mark = node.value[number][0].start_mark
                raise yaml.YAMLError(f"line {mark.line + 1}: {key} is there twice")
        return super().construct_mapping(node, deep)


_RIVALS: Mapping[tuple[str, ...], str] = {
    ("data", "validation"): "held_out",
    ("data", "held_out"): "validation",
    ("train", "steps"): "epochs",
    ("train", "epochs"): "steps",
}
"""Settings of which one is given, and what goes when the other is set over it."""


def merge(
    base: Mapping[str, Any], over: Mapping[str, Any], kinds: Kinds, path: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Lay a mapping over another one; neither is changed."""
    if path in kinds and "kind" in over and over["kind"] != base.get("kind", kinds[path]):
        return deepcopy(dict(over))
    gone = {_RIVALS.get((*path, key)) for key, value in over.items() if value is not None}
    merged = {key: deepcopy(value) for key, value in base.items() if key not in gone}
    for key, value in over.items():
        below = base.get(key)
        both = isinstance(value, dict) and isinstance(below, dict)
        merged[key] = merge(below, value, kinds, (*path, key)) if both else deepcopy(value)
    return merged


def _set(node: Any, above: tuple[str, ...], keys: Sequence[str], value: Any) -> Any:
    """Return a node with a value below it; a number in a key counts items."""
    if not keys:
        return value
    key, *rest = keys
    path = (*above, key)
    if isinstance(node, list):
        if not (key.isdigit() and int(key) < len(node)):
            raise UserError(f"{key} is not one of the {len(node)} items, from 0")
        return [_set(e, path, rest, value) if n == int(key) else e for n, e in enumerate(node)]
    if node is not None and not isinstance(node, dict):
        raise UserError(f"{above[-1]} is a value; it has no keys below it")
    gone = _RIVALS.get(path) if value is not None else None
    kept = {name: below for name, below in (node or {}).items() if name != gone}
    return {**kept, key: _set(kept.get(key), path, rest, value)}
