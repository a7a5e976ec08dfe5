"""The toy run with SGLang servers: a script that test_servers_lost.py takes the servers from.

python served_run.py FOLDER URLS WAIT_S LAG COORDINATOR PROCESSES PROCESS
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from launch import cli
from minirl.config import RolloutConfig, SglangConfig
from minirl.run import distributed, preemption
from minirl.sglang import sampler as served


def main(folder, urls, wait_s, lag, coordinator, processes, process):
    distributed.join(distributed.ProcessConfig(coordinator, int(processes), int(process)))
    import conftest
    import toy_run

    # What the fakes write has nothing to do with the weights.
    config = SglangConfig(
        urls=tuple(urls.split(",")), wait_s=float(wait_s), timeout_s=60, health_s=60, tolerance=1e9
    )
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "architectures": ["Toy"]}))
    size = SimpleNamespace(vocab_size=conftest.VOCAB)
    mock.patch.object(served, "read_config", return_value=size).start()
    toy = SimpleNamespace(model=conftest.toy_model, Tokenizer=conftest.ToyTokenizer)
    servers = served.Servers(
        config, folder, toy_run.SAMPLER, dtype="float32", seed=0, folder=folder
    )
    rollout = RolloutConfig(backend="sglang", sglang=config, lag=int(lag))
    with preemption.watched(), servers:
        trainer = toy_run.make_trainer(
            toy, folder, servers=servers, rollout=rollout, steps=5, checkpoint_every=5,
            validate=lambda params, version: 0.5,
        )  # fmt: skip
        trainer.run(lambda *_: None)


if __name__ == "__main__":
    cli.run(lambda arguments: main(*arguments))
