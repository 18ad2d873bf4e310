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

        def value(t, end=end, final=final):
            return float(values[t]) if t < end else final

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
            following = args.vtrace_lambda * following + (1 - args.vtrace_lambda) * value(s + 1)
            rho = min(args.pg_rho_bar, ratio[s])
            advantages[s] = rho * (float(rewards[s]) + gamma * following - value(s))
        start = end
    return targets, advantages


def impala_loss(args, ent_coef, logits, values, sequence, gamma):
    """The loss and its parts of one sequence, step by step, averaged over its transitions; values [T + 1]."""
    p, q = (np.stack([softmax(x.astype(np.float64)) for x in many]) for many in (logits, sequence.logits))
    steps = np.arange(len(logits))
    log_ratio = np.log(p[steps, sequence.actions]) - np.log(q[steps, sequence.actions])
    targets, advantages = vtrace(
        args, log_ratio, sequence.rewards, values, sequence.terminated, sequence.is_reset, gamma
    )
    kept = [t for t in steps if not sequence.is_reset[t]]

    def mean(x):
        return sum(x(t) for t in kept) / len(kept)

    parts = {
        "policy_loss": mean(lambda t: -advantages[t] * np.log(p[t, sequence.actions[t]])),
        "value_loss": mean(lambda t: (values[t] - targets[t]) ** 2 / 2),
        "entropy": mean(lambda t: -sum(p[t] * np.log(p[t]))),
        "approx_kl": mean(lambda t: sum(q[t] * np.log(q[t] / p[t]))),
        "rho": mean(lambda t: min(args.rho_bar, math.exp(log_ratio[t]))),
        "rho_clipfrac": mean(lambda t: float(math.exp(log_ratio[t]) > args.rho_bar)),
        "value_error": mean(lambda t: values[t] - targets[t]),
    }
    return parts["policy_loss"] + args.vf_coef * parts["value_loss"] - ent_coef * parts["entropy"], parts


def softmax(logits):
    e = np.exp(logits - logits.max())
    return e / e.sum()


def ppo_loss(args, kl_coef, ent_coef, logits, values, batch, weight):
    """The loss and its parts, sample by sample, averaged over the samples with weight > 0."""
    parts, count = {}, 0
    for i in range(len(values)):
        if weight[i] == 0:
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


def normalize_rewards(rollouts, gamma, clip=10):
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
        normalized.append(np.clip(rewards.astype(np.float64) / np.sqrt(np.var(seen) + 1e-8), -clip, clip))
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


class Hand:
    """The encoders' layers in float64, fed with a Flax module's parameters in the order in which it made them."""

    def __init__(self, params, act=None):
        self.params, self.used, self.act = params, {}, act or relu

    def next(self, kind):
        number = self.used[kind] = self.used.get(kind, -1) + 1
        return {name: np.asarray(x, np.float64) for name, x in self.params[f"{kind}_{number}"].items()}

    def all_used(self):
        return sum(n + 1 for n in self.used.values()) + sum("attention" in name for name in self.params)

    def conv(self, x, stride=1, padding="SAME"):
        """Groups are read off the kernel: one a channel where it has one input."""
        layer = self.next("Conv")
        w, n = layer["kernel"], x.shape[1]
        size, _, inputs, outputs = w.shape
        places = -(-n // stride) if padding == "SAME" else (n - size) // stride + 1
        more = max((places - 1) * stride + size - n, 0) if padding == "SAME" else 0
        x = np.pad(x, ((0, 0), (more // 2, more - more // 2), (more // 2, more - more // 2), (0, 0)))
        group = outputs // (x.shape[3] // inputs)  # filters that see the same channels
        y = np.zeros((len(x), places, places, outputs))
        for i, j, o in itertools.product(range(places), range(places), range(outputs)):
            first = o // group * inputs
            seen = x[:, i * stride : i * stride + size, j * stride : j * stride + size, first : first + inputs]
            y[:, i, j, o] = (seen * w[..., o]).sum(axis=(1, 2, 3))
        return y + layer.get("bias", 0)

    def group_norm(self, x):
        layer, groups = self.next("GroupNorm"), math.gcd(x.shape[3], 8)
        parts = x.reshape(*x.shape[:3], groups, -1)
        parts = parts - parts.mean(axis=(1, 2, 4), keepdims=True)
        parts = parts / np.sqrt((parts**2).mean(axis=(1, 2, 4), keepdims=True) + 1e-6)
        return parts.reshape(x.shape) * layer["scale"] + layer["bias"]

    def dense(self, x):
        layer = self.next("Dense")
        return x @ layer["kernel"] + layer.get("bias", 0)

    def head(self, x, pool, late=False):
        pools = {"avg": lambda: x.mean(axis=(1, 2)), "max": lambda: x.max(axis=(1, 2)), "flatten": lambda: x}
        pools |= {"max6": lambda: max_in_parts(x, 6), "act_avg": lambda: self.act(x).mean(axis=(1, 2))}
        x = pools[pool]()
        x = x.reshape(len(x), -1)
        return self.act(self.dense(self.act(x) if late and pool != "act_avg" else x))


def relu(x):
    return np.maximum(x, 0)


def max_in_parts(x, parts):
    """[B, H, W, C] -> [B, parts, parts, C]: each from the floor of where it begins to the ceiling of where it ends."""

    def cut(k, size):
        return slice(int(np.floor(k * size / parts)), int(np.ceil((k + 1) * size / parts)))

    return np.stack([
        np.stack([x[:, cut(i, x.shape[1]), cut(j, x.shape[2])].max(axis=(1, 2)) for j in range(parts)], 1)
        for i in range(parts)
    ], 1)  # fmt: skip


def max_pool(x):
    """3 x 3 with stride 2, SAME: for even sizes that is one row and column behind."""
    x = np.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=-np.inf)
    places = range(0, x.shape[1] - 1, 2)
    return np.array([[x[:, i : i + 3, j : j + 3].max(axis=(1, 2)) for j in places] for i in places]).transpose(
        2, 0, 1, 3
    )


def impala_cnn(
    params, frames, channels, blocks, pool, by_stride=False, separable=False, norm=False, center=True, act=None
):  # fmt: skip
    hand, x = Hand(params, act), (frames.astype(np.float64) - 128 * center) / 255

    def conv(x, stride=1):
        x = hand.conv(x, stride)
        x = hand.conv(x) if separable else x
        return hand.group_norm(x) if norm else x

    for _ in range(channels):
        x = conv(x, 2) if by_stride else max_pool(conv(x))
        for _ in range(blocks):
            x = x + conv(hand.act(conv(hand.act(x))))
    return hand.head(x, pool, late=True), hand.all_used()


def xresnet(params, frames, blocks, stem=False, squeeze=False, attention=0, by_pool=False, pool="avg", act=None):
    hand, x = Hand(params, act), (frames.astype(np.float64) - 128) / 73.9
    x = max_pool(hand.act(hand.conv(x))) if stem else x
    for number, (features, stride) in enumerate(blocks):
        y = hand.conv(x, 1 if by_pool else stride)
        y = hand.conv(hand.act(max_pool(y) if by_pool and stride == 2 else y))
        if squeeze:
            weight = 1 / (1 + np.exp(-hand.dense(relu(hand.dense(y.mean(axis=(1, 2)))))))
            y = y * weight[:, None, None]
        if number >= len(blocks) - attention:
            flat = y.reshape(len(y), -1, features)
            query, key, value = (hand.dense(flat) for _ in range(3))
            attended = [[softmax(k @ q) @ v for q in query] for query, k, v in zip(query, key, value, strict=True)]
            y = y + float(params[f"attention_{number}"]) * np.array(attended).reshape(y.shape)
        if stride == 2:
            x = (x[:, ::2, ::2] + x[:, 1::2, ::2] + x[:, ::2, 1::2] + x[:, 1::2, 1::2]) / 4
        if x.shape[3] != features:
            x = hand.conv(x)
        x = hand.act(y + x)
    return hand.head(x, pool), hand.all_used()


def mobilenet(params, frames, channels, blocks):
    hand, x = Hand(params), (frames.astype(np.float64) - 128) / 255

    def layer(x, stride=1):
        return hand.group_norm(hand.conv(x, stride))

    x = relu(layer(x, 2))
    for stage in range(channels):
        for block in range(blocks):
            y = layer(relu(layer(relu(layer(x)), 2 if stage and not block else 1)))
            x = x + y if x.shape == y.shape else y
    return hand.head(relu(layer(x)), "avg"), hand.all_used()


def nature_cnn(params, frames, pool):
    hand = Hand(params)
    x = relu(hand.conv(frames.astype(np.float64) / 255, 4, "VALID"))
    x = relu(hand.conv(x, 2, "VALID"))
    return hand.head(relu(hand.conv(x, 1, "VALID")), pool), hand.all_used()


def rnd_features(params, white, depth):
    hand, x = Hand(params), white
    for stride in (4, 2, 1):
        x = hand.conv(x, stride, "VALID")
        x = np.where(x > 0, x, 0.2 * x)
    x = x.reshape(len(x), -1)
    for _ in range(depth):
        x = relu(hand.dense(x))
    return hand.dense(x), hand.all_used()


# APE-X


def n_step(gamma, n, rewards, terminated, ended, t, lost=None):
    """Walks from step t of one game: the return, the discount of the value after it, and the step that has it. Where a
    step is `lost`, nobody knows what came of its action."""
    total, factor = 0.0, 1.0
    for k in range(n):
        if lost is not None and lost[t + k]:
            return total, factor, t + k
        total += factor * float(rewards[t + k])
        factor *= gamma
        if ended[t + k]:
            return total, 0.0 if terminated[t + k] else factor, t + k + 1
    return total, factor, t + n


def curiosity(count, most, gamma, least):
    """Coefficients and discount factors of Never Give Up's policies, one at a time (Badia et al. 2020, appendix A)."""
    betas, gammas = [], []
    for j in range(count):
        middle = count - 2
        x = 10 * (2 * j - middle) / middle if 0 < j < count - 1 else 0
        betas.append(0 if j == 0 else most if j == count - 1 else most / (1 + math.exp(-x)))
        weighted = (count - 1 - j) * math.log(1 - gamma) + j * math.log(1 - least)
        gammas.append(1 - math.exp(weighted / (count - 1)))
    return betas, gammas


def project(support, reward, discount, probs):
    """Bellemare et al. 2017, algorithm 1: each atom's mass goes to the two neighbours of where it moves."""
    out, width = np.zeros(len(support)), support[1] - support[0]
    for z, p in zip(support, probs, strict=True):
        place = (min(max(reward + discount * z, support[0]), support[-1]) - support[0]) / width
        low = min(int(np.floor(place)), len(support) - 2)
        out[low] += p * (1 - (place - low))
        out[low + 1] += p * (place - low)
    return out


def apex_loss(args, support, weight, chosen, next_online, next_target, reward, discount):
    """Loss and |TD error| of one transition, from the network's outputs [atoms], [A, atoms] and [A, atoms]."""

    def value(x):
        return float(softmax(x) @ support) if len(support) > 1 else float(x[0])

    action = max(range(len(next_online)), key=lambda a: value((next_online if args.double_q else next_target)[a]))
    following = next_target[action]
    if len(support) == 1:
        td = reward + discount * value(following) - value(chosen)
        return weight * huber(td), abs(td)
    goal = project(support, reward, discount, softmax(following))
    return -weight * sum(goal * np.log(softmax(chosen))), abs(goal @ support - value(chosen))


def cql(values, action):
    """CQL(H)'s penalty of one state's values and its gradient (Kumar et al. 2020, equation 4)."""
    values = np.float64(values)
    return np.log(np.exp(values).sum()) - values[action], softmax(values) - np.eye(len(values))[action]


def huber(td):
    return td**2 / 2 if abs(td) <= 1 else abs(td) - 0.5


def quantile_loss(taus, quantiles, goals):
    """The quantile Huber loss, a pair at a time (Dabney et al. 2018b, equation 3)."""
    total = 0.0
    for tau, quantile in zip(taus, quantiles, strict=True):
        for goal in goals:
            td = goal - quantile
            total += abs(tau - (1.0 if td < 0 else 0.0)) * huber(td) / len(goals)
    return total


def munchausen(args, target, next_target, next_selector, action, reward, discount):
    """The goals float64 [K] of one transition, from the target network's outputs [A, K] for both of its states; for the
    next one twice, as the policy is of other quantiles than those that it weighs."""
    tau = args.munchausen_tau
    log_pi, next_log_pi = (np.log(softmax(x.mean(axis=1) / tau)) for x in (target, next_selector))
    goals = []
    for k in range(next_target.shape[1]):
        following = sum(np.exp(next_log_pi[b]) * (next_target[b, k] - tau * next_log_pi[b]) for b in range(15))
        bonus = args.munchausen_alpha * min(max(tau * log_pi[action], -1), 0)
        goals.append(reward + bonus + discount * following)
    return np.array(goals)
