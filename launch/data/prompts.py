"""How a job puts its questions: schemas, value matches, wording. No JAX.

Training, validation, evaluation and `launch.ask` write prompts here, of the same facts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from launch.config import PromptConfig
from sqlenv.cache import DiskCache, shared_cache
from sqlenv.config import AgenticConfig, EnvConfig
from sqlenv.prompts import agent_observation, first_observation, judge_observation
from sqlenv.schema.reading import DatabaseSchema, Descriptions, read_schema
from sqlenv.schema.rendering import render_schema
from sqlenv.schema.values import ValueMatcher, with_matches
from sqlenv.types import Example, Observation, ValueMatch


class Prompts:
    """Writes prompts; the schema of a database is read once."""

    def __init__(
        self, config: PromptConfig, env: EnvConfig, *, disk: DiskCache | None = None
    ) -> None:
        self._config, self._env = config, env
        self._descriptions: dict[Path, Descriptions] = {}
        self._schema = cache(self._read_schema)
        self._text = cache(lambda path: self.render(self._schema(path)))
        shows_matches = config.value_matches and config.schema_style == "omnisql"
        self._matcher = ValueMatcher(disk or shared_cache()) if shows_matches else None

    def describe(self, descriptions: Mapping[Path, Descriptions]) -> None:
        """Use what data sets say of the columns of their databases."""
        self._descriptions |= descriptions

    def matches(self, example: Example) -> tuple[ValueMatch, ...]:
        """Find the values that a question names, where prompts show them."""
        return self._matcher.matches(example) if self._matcher else ()

    def schema(self, example: Example) -> DatabaseSchema:
        """Return the schema that an example's prompt shows."""
        return with_matches(self._schema(example.database), self.matches(example))

    def schema_text(self, example: Example) -> str:
        """Write the schema that an example's prompt shows."""
        matches = self.matches(example)
        if not matches:
            return self._text(example.database)
        return self.render(with_matches(self._schema(example.database), matches))

    def render(self, schema: DatabaseSchema) -> str:
        """Write a schema in the job's style."""
        return render_schema(schema, style=self._config.schema_style)

    def training(self, example: Example, schema_text: str | None = None) -> Observation:
        """Put a question as training episodes do."""
        if not isinstance(self._env, AgenticConfig):
            return self.single_turn(example, schema_text)
        text = self.schema_text(example) if schema_text is None else schema_text
        return agent_observation(example, text, self._env, style=self._config.style)

    def single_turn(self, example: Example, schema_text: str | None = None) -> Observation:
        """Put a question that one reply answers."""
        text = self.schema_text(example) if schema_text is None else schema_text
        return first_observation(example, text, style=self._config.style)

    def judge(self, example: Example, queries: Sequence[str]) -> Observation:
        """Ask for a score of each query (PaVeRL-SQL, prompt 2)."""
        return judge_observation(example, self.schema_text(example), queries)

    def _read_schema(self, database: Path) -> DatabaseSchema:
        return read_schema(
            database,
            examples=self._config.example_values,
            profile=self._config.schema_style == "profile",
            descriptions=self._descriptions.get(database),
        )
