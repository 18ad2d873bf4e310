"""The same maths written a second time: float64 NumPy, the slow, obvious way, one number at a time."""

import itertools
import math

import numpy as np


def gae(rewards, values, terminated, truncated, gamma, gae_lambda):
    """Schulman et al. 2016, equation 16, as the double sum, cut where an episode ends."""
    steps = len(rewards)
    advantages = np.zeros(steps)
    for t in range(steps):
        factor = 1.0
        for k in range(t, steps):
            following = 0.0 if terminated[k] else values[k + 1]
            advantages[t] += factor * (rewards[k] + gamma * following - values[k])
            if terminated[k] or truncated[k]:
                break
            factor *= gamma * gae_lambda
    return advantages


def vtrace(args, log_ratio, rewards, values, terminated, done, gamma):
    """Espeholt et al. 2018, equation 1 as it is printed, a sum of products for each step; values [T + 1].

    An episode at a time: junk steps are no part of any. Where one does not terminate, its last frame's value stands
    for the rest. Returns targets and advantages, NaN at junk steps.
    """
    targets, advantages = np.full((2, len(rewards)), np.nan)
    start = 0
    while start < len(rewards):
        if done[start]:
            start += 1
            continue
        end = start  # the episode's transitions are start .. end - 1, and `end` is the frame after the last
        while end < len(rewards) and not done[end]:
            end += 1
            if terminated[end - 1]:
                break
        final = 0.0 if terminated[end - 1] else float(values[end])
        value = lambda t: float(values[t]) if t < end else final  # noqa: B023, E731
        ratio = [math.exp(x) for x in log_ratio]
        for s in range(start, end):
            target = value(s)
            for t in range(s, end):
                c = math.prod(args.vtrace_lambda * min(args.c_bar, ratio[i]) for i in range(s, t))
                delta = min(args.rho_bar, ratio[t]) * (float(rewards[t]) + gamma * value(t + 1) - value(t))
                target += gamma ** (t - s) * c * delta
            targets[s] = target
        for s in range(start, end):
            following = targets[s + 1] if s + 1 < end else final
            rho = min(args.pg_rho_bar, ratio[s])
            advantages[s] = rho * (float(rewards[s]) + gamma * following - value(s))
        start = end
    return targets, advantages


def impala_loss(args, ent_coef, logits, values, sequence, gamma):
    """The loss and its parts of one sequence, step by step, averaged over its transitions; values [T + 1]."""
    p, q = (np.stack([softmax(x.astype(np.float64)) for x in many]) for many in (logits, sequence.logits))
    steps = np.arange(len(logits))
    log_ratio = np.log(p[steps, sequence.actions]) - np.log(q[steps, sequence.actions])
    targets, advantages = vtrace(args, log_ratio, sequence.rewards, values, sequence.terminated, sequence.done, gamma)
    kept = [t for t in steps if not sequence.done[t]]
    mean = lambda x: sum(x(t) for t in kept) / len(kept)  # noqa: E731
    parts = {
        "policy_loss": mean(lambda t: -advantages[t] * np.log(p[t, sequence.actions[t]])),
        "value_loss": mean(lambda t: (values[t] - targets[t]) ** 2 / 2),
        "entropy": mean(lambda t: -sum(p[t] * np.log(p[t]))),
        "approx_kl": mean(lambda t: sum(q[t] * np.log(q[t] / p[t]))),
        "rho": mean(lambda t: min(args.rho_bar, math.exp(log_ratio[t]))),
        "rho_clipfrac": mean(lambda t: float(math.exp(log_ratio[t]) > args.rho_bar)),
    }
    return parts["policy_loss"] + args.vf_coef * parts["value_loss"] - ent_coef * parts["entropy"], parts


def softmax(logits):
    e = np.exp(logits - logits.max())
    return e / e.sum()


def ppo_loss(args, kl_coef, ent_coef, logits, values, batch):
    """The loss and its parts, sample by sample, averaged over the samples with weight > 0."""
    parts, count = {}, 0
    for i in range(len(values)):
        if batch.weight[i] == 0:
            continue
        count += 1
        p, q = softmax(logits[i].astype(np.float64)), softmax(batch.logits[i].astype(np.float64))
        a, advantage, ret = batch.actions[i], float(batch.advantages[i]), float(batch.returns[i])
        ratio = p[a] / q[a]
        low, high = 1 - args.clip_coef, 1 + args.clip_coef
        value, old_value = float(values[i]), float(batch.values[i])
        error = (value - ret) ** 2
        if args.vf_clip:
            near = old_value + min(max(value - old_value, -args.vf_clip), args.vf_clip)
            error = max(error, (near - ret) ** 2)
        sample = {
            "policy_loss": -min(ratio * advantage, min(max(ratio, low), high) * advantage),
            "value_loss": error / 2,
            "entropy": -sum(p * np.log(p)),
            "approx_kl": sum(q * np.log(q / p)),
            "clipfrac": float(ratio < low or ratio > high),
        }
        for name, x in sample.items():
            parts[name] = parts.get(name, 0.0) + x
    parts = {name: x / count for name, x in parts.items()}
    loss = parts["policy_loss"] + args.vf_coef * parts["value_loss"] - ent_coef * parts["entropy"]
    return loss + kl_coef * parts["approx_kl"], parts


def normalize_rewards(rollouts, gamma):
    """Rollouts of (rewards, ended, valid) [T, N]: divides each by the standard deviation of all returns so far."""
    envs = rollouts[0][0].shape[1]
    past, seen, normalized = np.zeros(envs), [], []
    for rewards, ended, valid in rollouts:
        for t in range(len(rewards)):
            for n in range(envs):
                if valid[t, n]:
                    past[n] = gamma * past[n] + float(rewards[t, n])
                    seen.append(past[n])
                if ended[t, n]:
                    past[n] = 0.0
        normalized.append(np.clip(rewards.astype(np.float64) / np.sqrt(np.var(seen) + 1e-8), -10, 10))
    return normalized, np.mean(seen), np.var(seen)


def frame_stacks(frames, first, frame_stack, gap_stack):
    """Frames [T, N, ...] and whether each is an episode's first: a list of `frame_stack` frames a game, refilled with
    the first frame at each reset; joined along the last axis."""
    steps, envs = first.shape
    stacks, out = [None] * envs, []
    for t in range(steps):
        row = []
        for n in range(envs):
            stacks[n] = [frames[t, n]] * frame_stack if first[t, n] else [*stacks[n][1:], frames[t, n]]
            kept = [stacks[n][0], stacks[n][-1]] if gap_stack and frame_stack > 1 else stacks[n]
            row.append(np.concatenate(kept, axis=-1))
        out.append(np.stack(row))
    return np.stack(out)


def schedule(points, step):
    """Piecewise linear through (step, value) points, flat outside."""
    if step <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if step <= x1:
            return y0 + (y1 - y0) * (step - x0) / (x1 - x0)
    return points[-1][1]
