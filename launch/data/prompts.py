"""How a job puts its questions: schemas, value matches, wording. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from launch.config import PromptConfig
from sqlenv.config import AgenticConfig, EnvConfig
from sqlenv.data.loading import LoadedData
from sqlenv.data.prepared import read_stored_schema
from sqlenv.prompts import agent_observation, first_observation, judge_observation
from sqlenv.schema.reading import DatabaseSchema, Descriptions, read_schema
from sqlenv.schema.rendering import render_schema
from sqlenv.schema.values import with_matches
from sqlenv.types import Example, Observation


class Prompts:
    """Writes prompts; the schema of a database is read once."""

    def __init__(self, config: PromptConfig, env: EnvConfig) -> None:
        self._config, self._env = config, env
        self._descriptions: dict[Path, Descriptions] = {}
        self._files: dict[Path, Path] = {}
        self._schema = cache(self._read_schema)
        self._text = cache(lambda path: self.render(self._schema(path)))

    def add(self, data: LoadedData) -> None:
        """Use what data sets say of their databases, and the schemas that were prepared."""
        self._descriptions |= data.descriptions
        self._files |= data.schemas

    def schema(self, example: Example) -> DatabaseSchema:
        """Return the schema that an example's prompt shows."""
        return with_matches(self._schema(example.database), example.value_matches)

    def schema_text(self, example: Example) -> str:
        """Write the schema that an example's prompt shows."""
        if not example.value_matches:
            return self._text(example.database)
        return self.render(self.schema(example))

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
        examples, profile = self._config.example_values, self._config.schema_style == "profile"
        descriptions = self._descriptions.get(database)
        if database in self._files:
            stored = read_stored_schema(self._files[database])
            if (stored.examples, stored.profile) == (examples, profile):
                return stored.schema
            descriptions = stored.descriptions()
        return read_schema(database, examples=examples, profile=profile, descriptions=descriptions)
