"""A step of TRL's own GRPOTrainer on the CPU, by the lines of docs/rewards.md.

    python tests/rewards/adapters/trl_step.py MODEL LINES

LINES load the rows, make the trainer out of `model` and `args`, and train. Prints what TRL logged
as JSON; the trained model lies in `trained`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tiny_policy import MOST_TOKENS
from trl import GRPOConfig

GROUP = 8


def main(model: str, lines: str) -> None:
    args = GRPOConfig(
        output_dir="trained",
        per_device_train_batch_size=2 * GROUP,
        num_generations=GROUP,
        max_completion_length=MOST_TOKENS,
        max_steps=1,
        learning_rate=0.001,
        lr_scheduler_type="constant",
        logging_steps=1,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    names: dict[str, Any] = {"model": model, "args": args}
    exec(lines, names)  # noqa: S102  (the page's own lines)
    trainer = names["trainer"]
    trainer.save_model("trained")
    logged = next(log for log in trainer.state.log_history if "reward" in log)
    sys.stdout.write(json.dumps(logged) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
