"""Config files: found by path or packaged name, merged over their bases, overridden by key; and how
a mistake in one is told.

A config with `base: other.yaml` is merged over that file: mappings key by key; lists and values
replace. Where it names another `kind` of a section, nothing of the base's section remains.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from minirl.config.algorithms import AlgorithmConfig
from minirl.exchange import UserError
from minirl.run.files import describe
from rewards.config import ProgressiveConfig
from sqlenv.config import DiagnosedConfig

_KINDS = {
    ("env",): DiagnosedConfig().kind,
    ("reward",): ProgressiveConfig().kind,
    ("train", "algorithm"): AlgorithmConfig().kind,
}
"""Sections whose keys depend on their `kind`, and the default one of each."""
_PACKAGED = Path(__file__).parent / "configs"


def packaged() -> list[str]:
    """List the names of the configs that come with the project."""
    return sorted(path.name for path in _PACKAGED.glob("*.yaml"))


def nearest(word: str, known: Iterable[str]) -> str:
    """Ask for the known word that is most like another one; empty where none is like it."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {found[0]}? " if found else ""


def read(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Read a config by path or packaged name, merge it over its base, and set the overrides; each
    section that names no kind names its default one.
    """
    raw = _read(name, _find(name).resolve())
    for setting in overrides:
        raw = override(raw, setting)
    for keys, kind in _KINDS.items():
        node: Any = raw
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.setdefault("kind", kind)
    return raw


def _find(name: str) -> Path:
    """Find a config: a file, a run folder's, or a packaged one, whose ending may be left out."""
    path, known = Path(name), packaged()
    places = [path, path / "config.yaml"]
    places += [_PACKAGED / one for one in (name, f"{name}.yaml") if one in known]
    if found := next(filter(Path.is_file, places), None):
        return found
    if path.is_dir():
        raise UserError(f"--cfg {name}: no config.yaml in this folder; give a run folder or a file")
    raise UserError(
        f"--cfg {name}: no such file; {nearest(name, known)}packaged are {', '.join(known)}"
    )


def override(raw: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """Return a config with a setting, `key.sub=value`, over its own."""
    try:
        dotted, text = setting.split("=", 1)
        return _set(raw, (), dotted.split("."), _value(text))
    except IndexError:
        raise UserError(f"{setting!r}: the list has fewer items, counted from 0") from None
    except (TypeError, ValueError):
        form = "an override has the form key.sub=value, and the value is YAML"
        raise UserError(f"{setting!r}: {form}") from None


def _value(text: str) -> Any:
    """Read a setting's value: YAML where that has brackets or quotes around it, or is a truth, null
    or a number as Python writes it. All else is taken as it stands: in a path, # begins no comment,
    @ is a letter and 1:30 no number.
    """
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    is_form = text.startswith(("[", "{", "'", '"')) or text in ("", "null", "~")
    is_number = isinstance(value, int | float) and f"{value}" == text
    return value if is_form or is_number or isinstance(value, bool) else text


def _read(name: str, *files: Path) -> dict[str, Any]:
    """Read a config, the first of the files, and merge it over its base, which lies beside it or is
    a packaged one; the other files are those that it is a base of.
    """
    file = files[0]
    try:
        with file.open(encoding="utf-8") as text:
            raw = yaml.load(text, _Loader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{name}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{name}: a config is a mapping of keys to values")
    if "base" not in raw:
        return raw
    base = str(raw.pop("base"))
    for place in ((file.parent / base).resolve(), _PACKAGED / base):
        if place.is_file() and place not in files:
            return merge(_read(base, place, *files), raw)
    raise UserError(f"{name}: base: {base!r} is neither another file beside it nor a packaged one")


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice; PyYAML takes the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        keys = set()
        for key, _ in node.value:
            if key.value in keys:
                raise yaml.YAMLError(f"{key.value} is there twice{key.start_mark}")
            keys.add(key.value)
        return super().construct_mapping(node, deep)


_RIVALS: Mapping[tuple[str, ...], str] = {
    ("data", "validation"): "held_out",
    ("data", "held_out"): "validation",
    ("train", "steps"): "epochs",
    ("train", "epochs"): "steps",
}
"""Settings of which one is given, and what goes when the other is set over it."""


def merge(
    base: Mapping[str, Any], over: Mapping[str, Any], path: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Lay a mapping over another one; neither is changed."""
    if path in _KINDS and "kind" in over and over["kind"] != base.get("kind", _KINDS[path]):
        return dict(over)
    gone = {_RIVALS.get((*path, key)) for key, value in over.items() if value is not None}
    merged = {key: value for key, value in base.items() if key not in gone}
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value, (*path, key)) if both else value
    return merged


def _set(node: Any, above: tuple[str, ...], keys: Sequence[str], value: Any) -> Any:
    """Return a node with a value below it; a number in a key counts items."""
    if not keys:
        return value
    key, *rest = keys
    path = (*above, key)
    if isinstance(node, list):
        changed = list(node)
        changed[int(key)] = _set(changed[int(key)], path, rest, value)
        return changed
    kept = dict(node) if isinstance(node, dict) else {}  # such as of `mesh: auto`
    if value is not None:
        kept.pop(_RIVALS.get(path), None)
    is_whole = kept.keys() >= AlgorithmConfig.model_fields.keys()
    if path == ("train", "algorithm", "kind") and is_whole:
        # A run's config has all settings: what the kind before has said is not for another one.
        said = AlgorithmConfig(kind=kept["kind"]).model_dump().items()
        kept = dict(item for item in kept.items() if item not in said)
    return {**kept, key: _set(kept.get(key), path, rest, value)}


def explain(error: ValidationError, raw: Any, settings: type[BaseModel]) -> str:
    """Say the first mistake in a line; what a person wrote goes before what is missing."""
    first = min(error.errors(), key=lambda one: (one["type"] == "missing", -len(one["loc"])))
    known, keys, kind = [*_keys(settings, "", raw)], [], ""
    for part in first["loc"]:
        is_item = isinstance(raw, list) and isinstance(part, int)
        if is_item or (isinstance(raw, dict) and part in raw):
            raw = raw[part]
        elif first["type"] != "missing":
            kind = f" of kind {part}"  # no key: the member of a union that pydantic tried
            continue
        keys.append(str(part))
    path = ".".join(keys)
    if first["type"] == "contradiction":
        return ".".join(filter(None, (path, first["msg"])))
    if first["type"] != "extra_forbidden":
        return f"{path}: {describe(first)}"
    same = settings_named(settings, path.rpartition(".")[2], section=path.partition(".")[0])
    near = next((f"did you mean {one}? " for one in same if one in known), "")
    if path in same:
        near = f"another {path.rpartition('.')[0]}.kind has it; "
    near = near or nearest(path, known)
    # A run's own config may be of an earlier version.
    lists = "docs/configuration.md lists all, CHANGELOG.md what was removed"
    return f"{path}: unknown key{kind}; {near}{lists}"


def settings_named(settings: type[BaseModel], name: str, *, section: str = "") -> list[str]:
    """List the settings of this name, those of a section first and then the shortest."""
    same = {key for key in _keys(settings, "") if key.rpartition(".")[2] == name}
    return sorted(same, key=lambda key: (key.partition(".")[0] != section, len(key), key))


def _keys(kind: Any, path: str, given: Any = None) -> Iterator[str]:
    """Yield the keys of all settings below a type: of every member of a union, or of that of the
    kind that is given; of each item of a list that is given, or of a first one.
    """
    is_list = get_origin(kind) is tuple
    for number, one in enumerate(given if isinstance(given, list) else [given]):
        for member in get_args(kind):
            yield from _keys(member, f"{path}{number}." if is_list else path, one)
    values = given if isinstance(given, dict) else {}
    fields = getattr(kind, "model_fields", {})
    own = get_args(fields["kind"].annotation) if "kind" in fields else ()
    if own and values.get("kind", own[0]) not in own:
        return
    for name, field in fields.items():
        yield f"{path}{name}"
        yield from _keys(field.annotation, f"{path}{name}.", values.get(name))
