"""Do the four papers' claims hold here? One learner, one budget, seeds and intervals.

    python benchmarks/claims.py                       # all of it; writes docs/claims.md
    python benchmarks/claims.py --arms clause query --seeds 0 1 --folder runs/try --page try.md
    python benchmarks/claims.py --only attempts       # why effects do not show
    python benchmarks/claims.py --only page           # the page anew, of what is finished

docs/claims.md says what is asked and how it is decided. Runs are placed side by side, one on each
core: the same command gives the same numbers with any number of cores, on processors with the same
instructions. Run it again to resume. The page and its data keep the runs that they have; `--page`
takes a copy of the page for runs of one's own, without the data beside it.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from benchmarks import _claims_data, _claims_page
from benchmarks._claims_page import Part
from benchmarks._claims_statistics import Claim
from launch.config import load_config


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to learn: settings beside the config of its start, for each stage."""

    name: str
    start: str
    stages: tuple[dict[str, str], ...]

    def changed(self, word: str, settings: Mapping[str, str]) -> Arm:
        """Return the arm with more settings in all stages, named by a word for them."""
        return Arm(
            f"{self.name}-{word}", self.start, tuple({**one, **settings} for one in self.stages)
        )


_FOLDER = Path("runs/claims")
_PAGE = Path("docs/claims.md")
STEPS = 60
SEEDS = (0, 1, 2, 3, 4)
START_CONFIGS = {"replies": "progress-demo.yaml", "calls": "astra-demo.yaml"}
_TESTS = [
    f"{{layout: spider, path: {variant}, file: {variant}.json}}"
    for variant in _claims_data.VARIANTS
]
_SPLITS = {
    "data.train.sources": f"[{{layout: spider, path: {_claims_data.DATA}, split: train}}]",
    "data.validation.sources": f"[{{layout: spider, path: {_claims_data.DATA}, split: dev}}]",
    "data.test.sources": f"[{', '.join(_TESTS)}]",
}
_COMMON = {
    "data.demo": "null",
    "data.overlap": "tell",
    "evaluation.questions": "null",
    "model.tiny": "null",
    "warm_start": "null",
    # As in the papers: the demos leave out groups without a right answer.
    "train.algorithm.correctness_filter": "none",
    "train.checkpoint_every": "20",
}
_SINGLE = {"env": "{kind: single_turn, wrapping: sql_tag}", "sampler.max_response_tokens": "64"}
_EXECUTION = {"reward": "{kind: execution}"}
# With one update a batch every ratio is 1, and GRPO and GSPO are one and the same.
_FOUR = {"train.mini_batches": "4"}
# EXPO-SQL's own update: no group, credit as it is, KL in the credit.
_EXPO = {
    "train.algorithm": "{kind: expo}",
    "train.optimizer.warmup_steps": "6",
    "train.optimizer.final_fraction": "0.0",
}
# As when the study was registered: the default is now equation 4's `zero`.
_EXPO_REWARD = "kind: expo, outside_tokens: query"
_EXPO_SINGLE = {
    **_SINGLE,
    **_EXPO,
    "env": "{kind: single_turn, wrapping: sql_tag, match: bag_ordered}",
    "train.prompts_per_step": "128",
    "train.group_size": "1",
    "train.batching.micro_batch_tokens": "4096",
}
_HALVES = {"train.steps": str(STEPS // 2), "train.optimizer.schedule": "cosine"}
_FRACTION, _BINARY = ({"reward": f"{{kind: paverl, payoff: {p}}}"} for p in ("fraction", "binary"))

ARMS = {
    arm.name: arm
    for arm in (
        Arm("progressive", "replies", ({},)),
        Arm("one-shot", "replies", ({"reward": "{kind: one_shot}"},)),
        Arm("execution", "replies", (_EXECUTION,)),
        Arm("grpo-4", "replies", (_FOUR,)),
        Arm("gspo-4", "replies", ({"train.algorithm": "{kind: gspo}", **_FOUR},)),
        Arm("expo-turns", "replies", ({"reward": f"{{{_EXPO_REWARD}}}", **_EXPO},)),
        Arm("paverl-turns", "replies", ({"reward": "{kind: paverl}"},)),
        Arm("astra-turns", "replies", ({"reward": "{kind: astra}"},)),
        *(
            Arm(name, "replies", ({**_EXPO_SINGLE, "reward": f"{{{_EXPO_REWARD}, {setting}}}"},))
            for name, setting in {
                "clause": "",
                "query": "gap_scale: 0",
                "clause-types": "attribution: types",
                "clause-steps": "attribution: execution",
            }.items()
        ),
        *(
            Arm(name, "replies", tuple({**_SINGLE, **_HALVES, **half} for half in halves))
            for name, halves in {
                "fraction-binary": (_FRACTION, _BINARY),
                "fraction": (_FRACTION, _FRACTION),
                "binary": (_BINARY, _BINARY),
            }.items()
        ),
        Arm("atr-csmr", "calls", ({},)),
        Arm("terminal", "calls", (_EXECUTION,)),
        Arm("atr-no-final", "calls", ({"reward": "{kind: astra, final_step: never}"},)),
    )
}

VOTE_ARM = ARMS["fraction"]
"""Whose policies answer by several samples."""
DECODES = ("judge@8", "vote@8")
TAUGHT = tuple(f"{decode}-taught" for decode in DECODES)
"""The same by the policies that learned to judge."""
# Prompts of judgements hold eight queries beside the schema, their replies a line for each.
_LONG = ("sampler.max_prompt_tokens=1536", "sampler.max_response_tokens=128")
_TAUGHT_QUESTIONS = 3000
_TEACHING = (
    "warm_start={steps: 400, group_size: 4, groups_per_step: 4, checkpoint_every: 200, "
    "optimizer: {kind: muon, learning_rate: 0.003, warmup_steps: 20, schedule: cosine, "
    "beta2: 0.98}, "
    "batching: {micro_batch_tokens: 2048, prompt_multiple: 256, answer_multiple: 256}}"
)

CLAIMS = (
    Claim("Progress-SQL, table 3", "progressive", "one-shot"),
    Claim("this study, Progress-SQL's reward", "progressive", "execution"),
    Claim("Progress-SQL, table 13", "grpo-4", "gspo-4"),
    Claim("EXPO-SQL, table 4", "clause", "query"),
    Claim("EXPO-SQL, table 5", "clause", "clause-types"),
    Claim("EXPO-SQL, table 5", "clause", "clause-steps"),
    Claim("this study, PaVeRL-SQL's rewards", "fraction-binary", "binary"),
    Claim("this study, PaVeRL-SQL's rewards", "fraction-binary", "fraction"),
    Claim("this study, PaVeRL-SQL's judging", *DECODES),
    Claim("SQL-ASTRA, table 1", "atr-csmr", "terminal"),
    Claim("this study, SQL-ASTRA's reward", "atr-csmr", "atr-no-final"),
    Claim("this study, across papers", "progressive", "expo-turns"),
    Claim("this study, across papers", "progressive", "paverl-turns"),
    Claim("this study, across papers", "progressive", "astra-turns"),
)

_REWARDS = (
    ("progressive", "execution"),
    ("progressive", "one-shot"),
    ("fraction-binary", "binary"),
    ("fraction-binary", "fraction"),
    ("atr-csmr", "terminal"),
    ("atr-csmr", "atr-no-final"),
)
_CREDIT = (("clause", "query"), ("clause", "clause-types"), ("clause", "clause-steps"))
_HARD = f"[{{layout: spider, path: {_claims_data.DATA}, split: train, levels: [hard, extra]}}]"
CHANGES: dict[str, tuple[dict[str, str], Sequence[tuple[str, str]]]] = {
    "mixed": ({"train.algorithm.correctness_filter": "mixed"}, _REWARDS),
    "centred": ({"train.algorithm.estimator": "group_centred"}, _REWARDS),
    "whitened": ({"train.algorithm.whiten": "true"}, _CREDIT),
    "hard": ({"data.train.sources": _HARD}, (*_REWARDS, *_CREDIT)),
}
"""One change of both sides of a claim each, and the claims (docs/claims.md)."""
_NARROW = {"train.algorithm.clip_low": "3e-4", "train.algorithm.clip_high": "4e-4"}
ATTEMPTS = {
    arm.name: arm
    for arm in (
        *(
            ARMS[name].changed(word, settings)
            for word, (settings, pairs) in CHANGES.items()
            for pair in pairs
            for name in pair
        ),
        ARMS["gspo-4"].changed("narrow", _NARROW),
    )
}
"""Arms that ask why an effect does not show."""
COMPARED = (
    *(
        Claim(word, f"{better}-{word}", f"{worse}-{word}")
        for word, (_, pairs) in CHANGES.items()
        for better, worse in pairs
    ),
    Claim("narrow", "grpo-4", "gspo-4-narrow"),
    Claim("taught", *TAUGHT),
)
ATTEMPT_SEEDS = SEEDS[:3]
PARTS = {
    "results": Part(ARMS, DECODES, CLAIMS, is_test=True),
    "attempts": Part(ATTEMPTS, TAUGHT, COMPARED, is_test=False),
}
"""Parts of the page, by the names of their marks."""


@dataclass(frozen=True, slots=True)
class Study:
    """A folder of runs, and the commands that make them."""

    folder: Path

    def start(self, kind: str, seed: int) -> Path:
        """Return the folder of the warm start that arms of this kind and seed share."""
        return self.folder / "starts" / f"{kind}-seed{seed}"

    def stage(self, arm: Arm, seed: int, number: int) -> Path:
        """Return the run folder of an arm's stage."""
        return self.folder / "arms" / f"{arm.name}-seed{seed}" / f"stage{number}"

    def warm(self, kind: str, seed: int, core: int) -> None:
        """Make the start weights of a seed."""
        made = self.start(kind, seed)
        if (made / "warm" / "model").exists():
            return
        data = {"data.root": str(self.folder), "data.demo": "null", **_SPLITS}
        overrides = {**data, "data.overlap": "tell", "seed": str(seed), "run.dir": str(made)}
        _run(_train(START_CONFIGS[kind], overrides, "--only", "warm-start"), core, made)

    def train(self, arm: Arm, seed: int, core: int) -> None:
        """Run the stages of an arm, or what is left of them."""
        model = self.start(arm.start, seed) / "warm" / "model"
        for number, changes in enumerate(arm.stages, start=1):
            run = self.stage(arm, seed, number)
            if not (run / "result.json").exists():
                overrides = self.overrides(arm, changes, model) | {"seed": str(seed)}
                overrides["run.dir"] = str(run)
                _run(_train(START_CONFIGS[arm.start], overrides), core, run)
            exported = run / "exported"
            if number < len(arm.stages) and not exported.exists():
                words = ["launch.export", "--checkpoint", str(run), "--out", str(exported)]
                _run([*words, "--dtype", "float32"], core, run)
            model = exported

    def vote_run(self, seed: int) -> Path:
        """Return the run folder of a policy of `VOTE_ARM`."""
        return self.stage(VOTE_ARM, seed, len(VOTE_ARM.stages))

    def judge_policy(self, seed: int) -> Path:
        """Return the folder of that policy after it learned to judge."""
        return self.folder / "taught" / f"{VOTE_ARM.name}-seed{seed}"

    def train_judge(self, arm: Arm, seed: int, core: int) -> None:
        """Let the policy of an arm learn to judge its own answers to training questions."""
        made = self.judge_policy(seed)
        if (made / "model").exists():
            return
        run = self.stage(arm, seed, len(arm.stages))
        train, answers = _SPLITS["data.train.sources"], made.with_name(f"{made.name}-answers")
        if not (answers / "verdicts.json").exists():
            count = f"evaluation.questions={_TAUGHT_QUESTIONS}"
            _run(
                [*_answers(run, run, "vote@8", train), "--out", str(answers), count], core, answers
            )
        words = ["benchmarks._claims_judge", "--run", str(run), "--out", str(made)]
        words += ["--samples", str(answers / "predictions.jsonl")]
        _run([*words, f"data.test.sources={train}", _TEACHING], core, made)

    def votes(self, name: str, seed: int) -> Path:
        """Return the folder of what a policy of `VOTE_ARM` answered by several samples."""
        return self.folder / "votes" / f"{name}-seed{seed}"

    def vote(self, name: str, seed: int, core: int) -> None:
        """Let a policy of `VOTE_ARM` answer the questions as they are by several samples."""
        out = self.votes(name, seed)
        if (out / "verdicts.json").exists():
            return
        run = self.vote_run(seed)
        policy = self.judge_policy(seed) / "model" if name in TAUGHT else run
        command = _answers(run, policy, name.partition("-")[0], f"[{_TESTS[0]}]")
        # As many answers as a vote has, repetitions too.
        command += ["--out", str(out), "verbal.attempts=8"]
        _run(command, core, out)

    def overrides(self, arm: Arm, changes: dict[str, str], model: Path) -> dict[str, str]:
        """Return the settings in which a stage differs from the config of its start."""
        common = {"data.root": str(self.folder), **_SPLITS, **_COMMON, "model.path": str(model)}
        steps = {"train.steps": str(STEPS)}
        # A whole algorithm comes before what is set in it.
        kinds = {key: value for key, value in changes.items() if key == "train.algorithm"}
        return {**kinds, **common, **steps, **changes}


def main() -> None:
    """Run what is not finished yet, and write the page."""
    options = _options()
    study = Study(options.folder.resolve())
    is_attempt = options.only == "attempts"
    known = (*ATTEMPTS, VOTE_ARM.name) if is_attempt else ARMS
    arms = [(ARMS | ATTEMPTS)[name] for name in dict.fromkeys(options.arms or known)]
    seeds = sorted({*(options.seeds or (ATTEMPT_SEEDS if is_attempt else SEEDS))})
    if options.only != "page":
        demo = load_config(START_CONFIGS["replies"], []).data.demo
        assert demo is not None
        _claims_data.prepare(study.folder, demo)
        kinds = list(dict.fromkeys(arm.start for arm in arms))
        _run_parallel("start weights", study.warm, kinds, seeds)
        _run_parallel("arms", study.train, arms, seeds)
        if VOTE_ARM in arms and is_attempt:
            _run_parallel("learning to judge", study.train_judge, [VOTE_ARM], seeds)
        if VOTE_ARM in arms:
            _run_parallel("votes", study.vote, TAUGHT if is_attempt else DECODES, seeds)
    finished = {
        (arm.name, seed): [study.stage(arm, seed, number + 1) for number in range(len(arm.stages))]
        for arm in (*ARMS.values(), *ATTEMPTS.values())
        for seed in SEEDS
        if (study.stage(arm, seed, len(arm.stages)) / "result.json").exists()
    }
    votes = {
        (name, seed): study.votes(name, seed)
        for name in (*DECODES, *TAUGHT)
        for seed in SEEDS
        if (study.votes(name, seed) / "verdicts.json").exists()
    }
    data = study.folder / _claims_data.VARIANTS[0]
    _claims_page.write(options.page, PARTS, finished, votes, data)


def _run_parallel(
    title: str, work: Callable[..., None], items: Sequence[object], seeds: Iterable[int]
) -> None:
    """Call `work(item, seed, core)` for all pairs, one at a time on each core; seeds in turn."""
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in sorted(os.sched_getaffinity(0)):
        free.put(core)

    def one(item: object, seed: int) -> None:
        core = free.get()
        try:
            work(item, seed, core)
        finally:
            free.put(core)

    with Progress() as progress, ThreadPoolExecutor(free.qsize()) as pool:
        calls = [pool.submit(one, item, seed) for seed in seeds for item in items]
        bar = progress.add_task(title, total=len(calls))
        try:
            for call in as_completed(calls):
                call.result()
                progress.advance(bar)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _train(config: str, overrides: dict[str, str], *options: str) -> list[str]:
    words = [f"{key}={value}" for key, value in overrides.items()]
    return ["launch.train", "--accel", "cpu", "--cfg", config, *options, *words]


def _answers(run: Path, policy: Path, decode: str, sources: str) -> list[str]:
    """Write the command that lets a policy, a run's or another, answer questions by samples."""
    words = ["launch.eval", "--cfg", str(run / "config.yaml"), "--checkpoint", str(policy)]
    return [*words, "--decode", decode, f"data.test.sources={sources}", *_LONG]


def _run(words: Sequence[str], core: int, folder: Path) -> None:
    """Run a module on one core; its output goes to a file beside its folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    command = ["taskset", "--cpu-list", str(core), sys.executable, "-m", *words]
    with log.open("a") as output:
        ended = subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise SystemExit(f"{' '.join(words)}: status {ended.returncode}; see {log}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS | ATTEMPTS, metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, metavar="SEED")
    parser.add_argument("--folder", type=Path, default=_FOLDER)
    parser.add_argument(
        "--page", type=Path, help=f"{_PAGE}; of another folder's runs: a copy of it"
    )
    parser.add_argument(
        "--only", choices=("attempts", "page"),
        help="attempts: why effects do not show; page: run nothing, show all that is finished",
    )  # fmt: skip
    options = parser.parse_args()
    if options.page is None and options.folder != _FOLDER:
        parser.error(f"--folder: give --page too, a copy of {_PAGE}, which has other runs")
    options.page = options.page or _PAGE
    if not _claims_page.has_marks(options.page, PARTS):
        parser.error(f"--page {options.page}: is no copy of {_PAGE}")
    return options


if __name__ == "__main__":
    main()
