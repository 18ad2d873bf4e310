"""The same maths written a second time: float64 NumPy, the slow, obvious way, one number at a time."""

import itertools

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
