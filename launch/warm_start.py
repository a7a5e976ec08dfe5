"""The warm start: supervised training on demonstrations, before reinforcement learning."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import jax
from flax import nnx

from launch import cli
from launch.build import SqlSide
from launch.config import JobConfig, WarmStartConfig
from launch.data.preflight import sample
from launch.data.prompts import ReplyFormat, read_tokenizer
from launch.files import WARM, WARM_MODEL
from launch.learner import kept_plan, load_model, plan_memory, plan_phase
from launch.screening import OwnAnswer, Screened
from minirl.exchange import UserError
from minirl.exchange.memory import trim
from minirl.model import huggingface
from minirl.model.tokenizer import ChatTokenizer
from minirl.plan.fit import Plan
from minirl.run import distributed
from minirl.train.supervised import Demonstration, Lessons, supervise
from minirl.types import Progress
from sqlenv.data.corruptions import corrupt
from sqlenv.envs.single_turn import BaseEnvironment
from sqlenv.schema.spelling import spelled
from sqlenv.sql.answers import answer_of
from sqlenv.types import Example

_log = logging.getLogger(__name__)


def start_model(
    config: JobConfig, sql: SqlSide, train: Sequence[Example], source: Path, own: Sequence[Screened]
) -> Path:
    """Return the model folder that reinforcement learning starts from, after the warm start of the
    one in a folder, if there is one.

    Adapters of the warm start are merged in float32: those of learning are files of their own.

    Raises:
        UserError: The warm start needs more memory than there is.
    """
    if config.warm_start is None:
        return source
    target = config.folder / WARM_MODEL
    if distributed.from_first(target.exists):
        return target
    lessons = make_lessons(sql, read_tokenizer(config, source), train, own)
    config = plan_memory(config, config.folder / WARM, "warm_start", lessons)
    # Each phase has a plan of its own, without what lay there before.
    trim()
    _learn(lessons, config, source)
    trim()
    return target


def _learn(lessons: Lessons, config: JobConfig, source: Path) -> None:
    """Train the model of a folder, and write it into the run folder."""
    warm, folder = config.warm_start, config.folder
    assert warm is not None
    model, _ = load_model(config, source, lora=warm.lora)
    with cli.progress_bar("warm start") as progress:
        progress(0, lessons.steps(warm), "")
        params = supervise(model, lessons, warm, folder=folder / WARM, progress=progress)
    nnx.update(model, params)
    if distributed.count() > 1:
        nnx.update(model, jax.tree.map(distributed.whole, nnx.state(model)))
    distributed.from_first(lambda: huggingface.save(model, folder / WARM_MODEL, source=source))


def refuse_early(config: JobConfig, sql: SqlSide, train: Sequence[Example]) -> None:
    """Look whether the warm start of a trained model fits before anything is measured or screened,
    which takes long. Nothing is kept: it is planned when it begins, with what the process has then.

    Raises:
        UserError: It needs more memory than there is.
    """
    if not config.has_base or distributed.from_first((config.folder / WARM_MODEL).exists):
        return
    if kept_plan(config, config.folder / WARM, "warm_start") is None:
        distributed.gather(lambda: plan_early(config, sql, train))


def plan_early(config: JobConfig, sql: SqlSide, train: Sequence[Example]) -> Plan:
    """Plan a warm start before it can begin: of gold queries by its lessons, and of what is not
    known yet, a model's own answers or a tiny model's tokens, by the longest prompt and response.
    """
    lessons = None
    if config.model.path is not None and not config.learns_own:
        tokenizer = read_tokenizer(config, config.model.path)
        lessons = make_lessons(sql, tokenizer, train, ())
    return plan_phase(config, "warm_start", lessons)


def make_lessons(
    sql: SqlSide, tokenizer: ChatTokenizer, train: Sequence[Example], own: Sequence[Screened]
) -> Lessons:
    """Make what the warm start learns of training questions, and of a policy's own answers."""
    config, warm = sql.config, sql.config.warm_start
    assert warm is not None
    answers, environment = choose_answers(sql, train, own), sql.environment(tokenizer)
    with cli.progress_bar("demonstrations") as progress:
        taught = demonstrations(
            answers, environment, warm, ReplyFormat.of(config), seed=config.seed, progress=progress
        )
    return Lessons.of(taught, tokenizer, warm, seed=config.seed)


@dataclass(frozen=True, slots=True)
class TaughtAnswer:
    """What a demonstration teaches: an answer to a question.

    Attributes:
        reply: How the policy itself gave it; empty for the form that the prompt asks for.
    """

    example: Example
    sql: str
    reply: str = ""


def choose_answers(
    sql: SqlSide, train: Sequence[Example], own: Sequence[Screened]
) -> list[TaughtAnswer]:
    """Choose what the warm start teaches, by `warm_start.answers`; `examples` of them."""
    config, warm = sql.config, sql.config.warm_start
    assert warm is not None

    def gold(example: Example) -> TaughtAnswer:
        query = example.gold_sql
        if example.dialect == "sqlite":
            query = spelled(query, sql.prompts.schema(example))
        return TaughtAnswer(example, query)

    choose = partial(sample, limit=warm.examples, seed=config.seed, purpose="warm start")
    if warm.answers == "gold":
        return [gold(example) for example in choose(train)]
    screened, form = choose(own), ReplyFormat.of(config)
    takes_gold = warm.answers == "own_or_gold"
    answers = list[TaughtAnswer]()
    for one in screened:
        example = train[one.number]
        own_ones = [TaughtAnswer(example, each.sql, own_reply(each, form)) for each in one.answers]
        answers += own_ones or ([gold(example)] if takes_gold else [])
    _log.info(
        "warm start: %d own right answers to %d of %d questions%s",
        sum(len(one.answers) for one in screened),
        sum(bool(one.answers) for one in screened), len(screened),
        ", gold queries to the others" if takes_gold else "",
    )  # fmt: skip
    if not answers:
        raise UserError(
            "warm_start.answers=own: no answer of the screening is right; use own_or_gold or gold"
        )
    return answers


def own_reply(answer: OwnAnswer, form: ReplyFormat) -> str:
    """Return a policy's own reply, where the prompt asks for reasoning and it is a first reply in
    the form that it asks for; else nothing.
    """
    is_whole = form.reasons and form.agent is None and answer.turn == 1
    return answer.reply if is_whole and answer_of(answer.reply, form.wrapping).sql else ""


def demonstrations(
    answers: Sequence[TaughtAnswer],
    environment: BaseEnvironment,
    warm: WarmStartConfig,
    reply_format: ReplyFormat,
    *,
    seed: int,
    progress: Progress,
) -> list[Demonstration]:
    """Demonstrate every answer.

    With a tool, a demonstration is the transcript of an episode: the query as a call, the tool's
    response, the query as the answer; a repair calls with a corrupted query first.

    `repair_share` of the demonstrations first give a corrupted query, then correct it after the
    feedback (the right answer alone where the corruption does not change the result), and
    `mistake_share` of the others answer with a corrupted query. The seed decides which ones.
    """
    rng, repairing = Random(f"{seed} demonstrations"), warm.repair_share
    corrupted = repairing + (1 - repairing) * warm.mistake_share
    made = []
    for number, answer in enumerate(answers, start=1):
        draw, gold = rng.random(), answer.sql
        repairs = draw < repairing
        wrong = corrupt(gold) if draw < corrupted else None
        queries = [wrong, gold] if repairs and wrong else [gold if repairs else wrong or gold]
        made.append(_demonstration(answer, environment, reply_format, queries))
        if number % 100 == 0:
            progress(number, len(answers), "")
    return made


def _demonstration(
    answer: TaughtAnswer, env: BaseEnvironment, form: ReplyFormat, queries: Sequence[str]
) -> Demonstration:
    """Answer with the last query, after the feedback on one before; or call the tool with each, and
    answer with the last one, whose call is learnt too.
    """
    example, agent = answer.example, form.agent
    episode, question = env.reset(example)
    observations, replies = [question], list[str]()
    for sql in queries[:-1] if agent is None else queries[-agent.calls :]:
        reply = form.answer(sql) if agent is None else form.call(sql, example)
        episode, response = env.step(episode, reply)
        if response is not None:  # else the corruption does not change the result
            observations.append(response)
            replies.append(reply)
    final = queries[-1]
    last = answer.reply or form.answer(final) if agent is None else form.last(final)
    return Demonstration(
        tuple(observations), (*replies, last),
        learnt=1 if agent is None else 2, learn_responses=agent is None,
        # A group is as long as its longest member.
        key=(example.db_id, len(replies)),
    )  # fmt: skip
