"""Write the tables of docs/ that come from the code: settings, data sets, test sets.

    python docs/generate.py

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`. `tests/test_docs.py` fails
where a page differs from what this script writes.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launch.config import JobConfig
from minirl.config.algorithms import PRESETS, AlgorithmConfig
from sqlenv.data.layouts import DATASETS, SETS

DOCS = Path(__file__).parent
_START, _END = "<!-- generated: {} -->\n", "<!-- end -->"
_SECTION = "-"

Model = type[BaseModel]
Row = tuple[str, str, str]


def main() -> None:
    """Write every page anew."""
    for path in DOCS.glob("*.md"):
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")


def fill(page: str) -> str:
    """Replace the generated tables of a page."""
    for name, make in TABLES.items():
        start = _START.format(name)
        if start in page:
            before, _, rest = page.partition(start)
            page = f"{before}{start}\n{make()}\n\n{_END}{rest.partition(_END)[2]}"
    return page


def settings() -> str:
    """Describe every setting of a job: a heading for each group of keys, every class once."""
    parts: list[str] = []
    for models, paths in _groups():
        names = ", ".join(f"`{path}`" for path in paths) if paths[0] else "The job"
        parts.append(f"{'###' if '.' in paths[0] else '##'} {names}")
        if len(models) == 1:
            parts += [_doc(models[0]), _list(_rows(models[0]))]
            parts += _algorithms() if models[0] is AlgorithmConfig else []
        else:
            parts += _kinds(models)
    return "\n\n".join(parts)


def _algorithms() -> Iterator[str]:
    for kind, (source, settings) in PRESETS.items():
        told = ", ".join(f"`{name}: {_value(value)}`" for name, value in settings.items())
        yield f"`kind: {kind}`. {source}" + (f" Here {told}." if told else "")


def datasets() -> str:
    """Describe how each data set is laid out."""
    rows = []
    for name, spec in DATASETS.items():
        more = {split: f" (and `{file}`)" for split, file in spec.more.items()}
        files = "; ".join(
            f"{split}: {_code(found)}{more.get(split, '')}" for split, found in spec.files.items()
        )
        rows.append((f"`{name}`", files, _code(spec.databases), f"`{spec.omnisql}/`"))
    head = ("`layout`", "question files", "folders of databases", "in OmniSQL's `data/`")
    return _table(head, rows)


def test_sets() -> str:
    """Describe the published test sets."""
    sets = [(name, one) for name, one in SETS.items() if one.comparators]
    rows = [(f"`{name}`", f"{one.questions:,}", _code(one.comparators)) for name, one in sets]
    return _table(("`--data`", "questions", "judged by"), rows)


TABLES = {"settings": settings, "data sets": datasets, "test sets": test_sets}


def _groups() -> list[tuple[tuple[Model, ...], list[str]]]:
    """Return the models of a job and the keys that hold them, section by section."""
    found: dict[tuple[Model, ...], list[str]] = {(JobConfig,): [""]}
    queue: list[tuple[Model, str]] = [(JobConfig, "")]
    for model, path in queue:  # which grows
        for name, field in model.model_fields.items():
            if inner := _models(field):
                if inner not in found:
                    queue += [(one, f"{path}{name}.") for one in inner]
                paths = found.setdefault(inner, [])
                paths += [f"{path}{name}"] if f"{path}{name}" not in paths else []
    sections = ["", *JobConfig.model_fields]
    return sorted(found.items(), key=lambda group: sections.index(group[1][0].split(".")[0]))


def _kinds(models: Sequence[Model]) -> Iterator[str]:
    """Describe a union: keys of all kinds, then what each kind has of its own."""
    kinds = {model: {row[0]: row for row in _rows(model)} for model in models}
    first, *others = kinds.values()
    shared = [key for key in first if key != "`kind`" and all(key in rows for rows in others)]
    if shared:
        yield f"All kinds, with the defaults of `{models[0].model_fields['kind'].default}`:"
        yield _list(first[key] for key in shared)
    for model, rows in kinds.items():
        other = [f"{k[:-1]}: {rows[k][1][1:]}" for k in shared if rows[k][1] != first[k][1]]
        told = f" Here {', '.join(other)}." if other else ""
        yield f"`kind: {model.model_fields['kind'].default}`. {_doc(model)}{told}"
        if own := [row for key, row in rows.items() if key not in [*shared, "`kind`"]]:
            yield _list(own)


def _rows(model: Model) -> Iterator[Row]:
    """Yield a row for each setting, but for sections: their headings say the same."""
    meanings = _meanings(model)
    for name, field in model.model_fields.items():
        inner = _models(field)
        if inner and _default(field) == _SECTION:
            continue
        told = meanings.get(name, "")
        choices = [f"`{_value(one)}`" for one in _choices(field.annotation) if one != field.default]
        if unnamed := [choice for choice in choices if choice not in told and name != "kind"]:
            others = "One of" if field.is_required() else "Also"
            told = f"{told} {others} {', '.join(unnamed)}.".strip()
        yield f"`{name}`", _default(field), _escape(told)


def _models(field: FieldInfo) -> tuple[Model, ...]:
    """Return the models that a field may hold; of a list, those of its items."""
    parts = get_args(field.annotation) or (field.annotation,)
    return tuple(one for one in parts if inspect.isclass(one) and issubclass(one, BaseModel))


def _choices(annotation: Any) -> Iterable[Any]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return ()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None or isinstance(field.default, BaseModel):
        kind = getattr(field.default, "kind", None)
        return f"`kind: {kind}`" if kind and len(_models(field)) > 1 else _SECTION
    return f"`{_value(field.default)}`"


def _value(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    plain = str(plain) if isinstance(plain, Path) else plain
    return yaml.safe_dump(plain, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


@cache
def _meanings(model: Model) -> Mapping[str, str]:
    """Read the docstrings of fields, which Python itself does not keep."""
    found: dict[str, str] = {}
    for one in reversed(model.__mro__):
        if issubclass(one, BaseModel) and one is not BaseModel:
            (tree,) = ast.parse(inspect.getsource(one)).body
            assert isinstance(tree, ast.ClassDef)
            for node, after in zip(tree.body, tree.body[1:], strict=False):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    match after:
                        case ast.Expr(value=ast.Constant(value=str(text))):
                            found[node.target.id] = " ".join(text.split())
    return found


def _doc(model: Model) -> str:
    return " ".join((model.__doc__ or "").partition("\n\n")[0].split())


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _escape(text: str) -> str:
    """Write text for Markdown: no columns and tags of its own, None as YAML has it, and links."""
    text = re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)
    parts = text.replace("|", r"\|").split("`")
    parts[::2] = [re.sub(r"\bNone\b", "`null`", one.replace("<", "&lt;")) for one in parts[::2]]
    return "`".join(parts)


def _list(rows: Iterable[Row]) -> str:
    """Write settings as a list, each with its default as in YAML."""
    return "\n".join(
        f"- {_yaml(key, default)}{told and f': {told}'}" for key, default, told in rows
    )


def _yaml(key: str, default: str) -> str:
    """Join a key and its default, such as `seed` and `0`; one without is named alone."""
    if not default.startswith("`"):
        return key if default == _SECTION else f"{key} ({default})"
    value = default.strip("`")
    return f"`{key.strip('`')}: {f'{{{value}}}' if value.startswith('kind:') else value}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *lines = (f"| {' | '.join(line)} |".replace("|  |", "| |") for line in [head, *rows])
    return "\n".join([first, "|" + "---|" * len(head), *lines])


if __name__ == "__main__":
    main()
