"""Config files: found by path or packaged name, and laid over the config that they name as base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from sqlenv.errors import UserError

BASE = "base"
"""Key of a config that names the one it is laid over."""
Kinds = Mapping[tuple[str, ...], str]
"""Paths of the sections whose keys depend on their `kind`, each with its default kind."""
_RIVALS: Mapping[tuple[str, ...], str] = {
    ("data", "validation"): "held_out",
    ("data", "held_out"): "validation",
    ("train", "steps"): "epochs",
    ("train", "epochs"): "steps",
}
"""Settings of which one is given, and what goes when a later layer gives the other."""
_PACKAGED = resources.files("launch") / "configs"


@dataclass(frozen=True, slots=True)
class Layer:
    """What one file says, without its `base`.

    Attributes:
        name: The file, as whoever asked for it wrote it.
        raw: Its keys and values.
    """

    name: str
    raw: Mapping[str, Any]


def packaged() -> list[str]:
    """List the names of the configs that come with the project."""
    return sorted(entry.name for entry in _PACKAGED.iterdir() if entry.name.endswith(".yaml"))


def read_layers(name: str) -> list[Layer]:
    """Read a config and, as long as it names one, its base, that one's base, and so on.

    Args:
        name: A path or a packaged name. A base is looked for beside the file that names it, then
            among the packaged ones.

    Returns:
        At least one layer, the named config first.

    Raises:
        UserError: A file is not there or not YAML, or bases go in a circle.
    """
    layers: list[Layer] = []
    seen: list[Traversable] = []
    file: Traversable | None = _find(name)
    while file is not None:
        raw = _parse(file, name)
        layers.append(Layer(name, {key: value for key, value in raw.items() if key != BASE}))
        seen.append(file)
        if BASE not in raw:
            break
        base = raw[BASE]
        file = _find_base(base, beside=file, name=name)
        if file in seen:
            way = ", ".join([*(layer.name for layer in layers), base])
            raise UserError(f"{name}: base: goes in a circle ({way}); name another config")
        name = base
    return layers


def lay_over(layers: Sequence[Layer], kinds: Kinds) -> dict[str, Any]:
    """Lay each config over its base, mapping by mapping; lists and single values replace.

    Args:
        layers: The topmost first.
        kinds: Where a layer names another kind of one of these sections, nothing of its base's
            section is left.
    """
    merged: Mapping[str, Any] = {}
    for layer in reversed(layers):
        merged = _merge(merged, layer.raw, kinds)
    return deepcopy(dict(merged))


def drop_rivals(raw: dict[str, Any], keys: Sequence[str]) -> None:
    """Take out of a config, in place, what goes when a key is set over it."""
    for depth in range(1, len(keys) + 1):
        *parents, _ = keys[:depth]
        rival = _RIVALS.get(tuple(keys[:depth]))
        if rival is None:
            continue
        node: Any = raw
        for key in parents:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(rival, None)


def origin(layers: Sequence[Layer], keys: Sequence[str | int]) -> str:
    """Name the file that says something of a key; the topmost one if none does."""

    def says(node: Any) -> bool:
        for key in keys:
            is_there = key in node if isinstance(node, dict) else _has_item(node, key)
            if not is_there:
                return False
            node = node[key]
        return True

    return next((layer.name for layer in layers if says(layer.raw)), layers[0].name)


def _has_item(node: Any, key: str | int) -> bool:
    return isinstance(node, list) and isinstance(key, int) and key < len(node)


def _merge(
    base: Mapping[str, Any],
    over: Mapping[str, Any],
    kinds: Kinds,
    path: tuple[str, ...] = (),
) -> Mapping[str, Any]:
    if path in kinds and "kind" in over and over["kind"] != base.get("kind", kinds[path]):
        return over
    gone = {_RIVALS.get((*path, key)) for key, value in over.items() if value is not None}
    merged = {key: value for key, value in base.items() if key not in gone}
    for key, value in over.items():
        below = base.get(key)
        both = isinstance(value, dict) and isinstance(below, dict)
        merged[key] = _merge(below, value, kinds, (*path, key)) if both else value
    return merged


def _find(name: str) -> Traversable:
    path = Path(name)
    if path.is_file():
        return path.resolve()
    if name in packaged():
        return _PACKAGED / name
    raise UserError(f"--cfg {name}: no such file, and not one of {', '.join(packaged())}")


def _find_base(base: Any, *, beside: Traversable, name: str) -> Traversable:
    if not isinstance(base, str):
        raise UserError(f"{name}: base: should be the name of a config, not {base!r:.60}")
    for found in _candidates(base, beside):
        if found.is_file():
            return found
    raise UserError(
        f"{name}: base: there is no {base} beside it, and it is not one of {', '.join(packaged())}"
    )


def _candidates(base: str, beside: Traversable) -> Iterator[Traversable]:
    if isinstance(beside, Path):
        yield (beside.parent / base).resolve()
    yield _PACKAGED / base


def _parse(file: Traversable, name: str) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: cannot be read as text ({error})") from None
    try:
        raw = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{name}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{name}: a config is a mapping of keys to values")
    return raw


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice; PyYAML takes the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        keys = [key.value for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                mark = node.value[number][0].start_mark
                raise yaml.YAMLError(f"line {mark.line + 1}: {key} is there twice")
        return super().construct_mapping(node, deep)
