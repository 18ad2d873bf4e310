#!/usr/bin/env bash
#SBATCH --job-name=jax-rl
#SBATCH --output=slurm/%x-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:1
#SBATCH --time=04:00:00
# An array of sweep workers, or of runs of one script with the task's number as seed. A task gets SIGTERM two minutes
# before its time limit, and at preemption if the cluster has a grace period; it writes a checkpoint, is requeued and
# resumes. Run from the repository, with sbatch's flags first:
#
#   mkdir -p slurm
#   sbatch --array=0-7 experiments/slurm.sh sweep sweeps/coinrun_ppo_grid.yaml
#   sbatch --array=0-7 experiments/slurm.sh sweep sweeps/doorgym_hnppo_bayes.yaml --count 40
#   sbatch --array=1-3 experiments/slurm.sh run ppo_procgen.py --env-id bigfish
#   sbatch --gres=gpu:8 experiments/slurm.sh run ppo_procgen.py --env-id bigfish --num-envs 512           # eight GPUs
#   sbatch --gres=gpu:8 --nodes=4 --ntasks-per-node=1 experiments/slurm.sh run ppo_procgen.py --num-envs 2048   # four hosts
#
# A job of several tasks trains one run on all of them (--distributed), one task per host with all of its GPUs. Workers
# share a sweep's folder on a file system with locks; for many, PostgreSQL (--storage) is better than SQLite.
set -euo pipefail
kind=${1:?give sweep or run}
what=${2:?give a sweep file or a script}
shift 2
python=${PYTHON:-python}
task=${SLURM_ARRAY_TASK_ID:-0}

case $kind in
  sweep) command=("$python" -m experiments.sweep "$what" "$@") ;;
  run)
    folder=${OUT:-runs/slurm}/${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-0}}/$task
    mkdir -p "$folder"
    checkpoint=$(find "$folder" -mindepth 3 -maxdepth 3 -path '*/checkpoints/[0-9]*' ! -name '*.*' -print -quit)
    if [ -n "$checkpoint" ]; then
      command=("$python" "$what" --resume "$(dirname "$(dirname "$checkpoint")")")
    else
      own=(--seed "$task" --run-dir "$folder")
      [[ " $* " == *" --resume"* ]] && own=() # a resumed run keeps its own
      command=("$python" "$what" "${own[@]}" "$@")
    fi
    ;;
  *) echo "error: $kind: give sweep or run" >&2; exit 2 ;;
esac
if [ "${SLURM_NTASKS:-1}" -gt 1 ]; then
  [ "$kind" = run ] || { echo "error: sweep: takes one task a job, and an array of jobs" >&2; exit 2; }
  # By itself srun takes a single core for each task.
  command=(srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${command[@]}" --distributed)
fi

ask_to_stop() { # srun answers TERM by killing its tasks: Slurm signals these, and leaves this shell out
  if [ "${SLURM_NTASKS:-1}" -gt 1 ]; then scancel --signal=TERM "${SLURM_JOB_ID:-}"; else kill -TERM "$child"; fi || true
}

# bash hears a signal at once only while it waits for a command in the background.
child=
stopped=
waiting=1
trap 'stopped=1; waiting=1; [ -z "$child" ] || ask_to_stop' TERM INT
"${command[@]}" &
child=$!
[ -z "$stopped" ] || ask_to_stop
while [ -n "$waiting" ]; do # a signal ends bash's wait early
  waiting=
  code=0
  wait "$child" || code=$?
done
# 130 and 143: stopped before it handled signals. scancel sends the same signal, but then the job is COMPLETING.
if [ -n "$stopped" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
  job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$task} # one task of an array has the array's own id
  job=${job:-$SLURM_JOB_ID}
  state=$(squeue --noheader --jobs="$job" --format=%T 2>/dev/null || true)
  case $state/$code in
    COMPLETING/* | CANCELLED/*) ;;
    */0 | */130 | */143) scontrol requeue "$job" ;;
  esac
fi
exit "$code"
