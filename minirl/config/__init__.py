"""Every setting of the learner, its sampler and its servers; checks are validators."""

from minirl.config.algorithms import (
    Aggregation,
    Algorithm,
    AlgorithmConfig,
    Correction,
    Dapo,
    DrGrpo,
    Estimator,
    Expo,
    Grpo,
    Gspo,
    GspoToken,
    KlEstimator,
    KlPlace,
    RatioLevel,
    ReinforcePlusPlus,
    Rloo,
    TokenCredit,
)
from minirl.config.base import (
    Settings,
    contradiction,
)
from minirl.config.rollout import (
    SGLANG_PYTHON,
    RolloutConfig,
    SamplerConfig,
    SglangConfig,
    check_installed,
)
from minirl.config.train import (
    CONTROL_TOKENS,
    MARKS,
    BatchingConfig,
    GuardConfig,
    LoraConfig,
    Matrix,
    MeshConfig,
    ModelSource,
    OptimizerConfig,
    Remat,
    SecondStage,
    SftConfig,
    TinyConfig,
    TrainConfig,
    check_together,
    least_vocabulary,
)
