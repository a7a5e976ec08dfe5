#!/bin/bash
# One run over several nodes:   sbatch slurm.sh progress.yaml runs/progress [key=value ...]
# The run folder has to be on a file system that all nodes share.
# With SGLang's servers on some GPUs of each node, the learner has the others:
#   LEARNER_GPUS=0,1,2,3 sbatch slurm.sh progress.yaml runs/progress \
#     rollout.sglang.launch=4 rollout.sglang.devices='["4", "5", "6", "7"]'
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1     # one process a node: it samples on all GPUs of its node
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64      # queries run on these
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600       # seconds before the end: 7B saves 91 GB twice, at 0.4 GB/s or more
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

config=${1:?config, for example progress.yaml}
folder=${2:?run folder}
shift 2

# Addresses and numbers of the processes come from Slurm's variables. If a process dies, the others
# end by themselves within a minute or two.
learner=(${LEARNER_GPUS:+env "CUDA_VISIBLE_DEVICES=$LEARNER_GPUS"})
srun --kill-on-bad-exit=1 "${learner[@]}" \
  python -m launch.train --accel gpu --cfg "$config" run.dir="$folder" "$@"

# Stopped before its end, it has saved all, and goes on when its turn in the queue comes again.
if [[ ! -f $folder/result.json ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
