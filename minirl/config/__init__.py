"""Every setting of the learner, its sampler and its servers, but the algorithms (`algorithms.py`);
checks are validators.
"""

from minirl.config.rollout import SGLANG_PYTHON, RolloutConfig, SamplerConfig, SglangConfig
from minirl.config.train import (
    MOST_TOKENS,
    BatchingConfig,
    LoraConfig,
    MeshConfig,
    ModelSource,
    OptimizerConfig,
    Remat,
    SftConfig,
    TrainConfig,
)
