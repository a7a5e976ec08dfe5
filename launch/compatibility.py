"""Which settings of different parts of a job go together: one table, checked at load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rewards.config
from rewards.config import Clash
from sqlenv.prompts import ASKED_FOR

if TYPE_CHECKING:
    from launch.config import JobConfig


def clashes(config: JobConfig) -> list[Clash]:
    """List the pairs of settings that may not go together, and whether they do not here."""
    data, model, train = config.data, config.model, config.train
    env, reward, style = config.env, config.reward, config.prompt.style
    asked, is_agentic = ASKED_FOR[style], env.kind == "agentic"
    # Clauses or turns of one trajectory that have rewards of their own.
    spans = {
        "expo": ("reward.gap_scale", reward.kind == "expo" and reward.gap_scale > 0),
        "astra": ("reward.aggregate", reward.kind == "astra" and reward.aggregate == "steps"),
    }
    paid_apart, is_apart = spans.get(reward.kind, ("reward.kind", False))
    return [
        Clash(
            ("train.epochs", "data.train.total"),
            train.epochs is not None and data.train.total is None,
            "epochs are passes over that many questions; set it, or train.steps",
        ),
        Clash(
            ("model.path", "model.tiny"),
            (model.path is None) == (model.tiny is None),
            "give one of them (a folder, or a model made on the spot); set the other to null",
        ),
        Clash(
            ("sampler.temperature", "train.algorithm.kind"),
            config.sampler.temperature == 0,
            "0 is greedy, and reinforcement learning learns from samples; use 1.0",
        ),
        Clash(
            ("prompt.style", "env.wrapping"),
            env.wrapping not in ("any", asked or env.wrapping),
            f"the prompt asks for another form, which is not read; use env.wrapping={asked}",
        ),
        Clash(
            ("prompt.style", "env.kind"),
            style == "progress" and is_agentic,
            "the prompt asks for one reply and not for calls of a tool; use prompt.style=omnisql",
        ),
        Clash(
            ("evaluation.episode", "env.kind"),
            config.evaluation.episode == "agentic" and not is_agentic,
            "agentic measures tool-calling episodes; use env.kind=agentic, or single_turn",
        ),
        *rewards.config.clashes(reward, env),
        Clash(
            (paid_apart, "train.algorithm.estimator"),
            is_apart and train.algorithm.estimator != "direct",
            "rewards of parts of a reply would be lost; use train.algorithm.kind=expo, or "
            "train.algorithm.estimator=direct",
        ),
        Clash(
            (paid_apart, "train.algorithm.token_credit"),
            is_apart and train.algorithm.token_credit != "own",
            "a part would be paid for those after it; use train.algorithm.token_credit=own",
        ),
    ]
