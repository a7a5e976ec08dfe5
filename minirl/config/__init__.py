"""Every setting of the learner, its sampler and its servers; checks are validators."""

from minirl.config.algorithms import (
    Algorithm,
    AlgorithmConfig,
    Cispo,
    Dapo,
    DrGrpo,
    Expo,
    Grpo,
    Gspo,
    ReinforcePlusPlus,
)
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
from minirl.exchange.settings import Settings
