"""
Every measurement of the project, one function each: formula, unit and source in its docstring. Imports torch alone.

Token states x have shape (..., n, d), tokens on the last-but-one axis, unit rows; one value per leading index.
No n x n matrix is kept where n x d will do: Gram matrices are taken in blocks of rows.
"""
import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

BLOCK = 2 ** 20  # numbers of a Gram matrix that are held at a time: they stay in the cache


def row_blocks(x):
    """Slices of rows: at most BLOCK numbers of the Gram matrices of x (..., n, d) each."""
    n, step = x.shape[-2], max(1, BLOCK // max(1, x[..., 0].numel()))
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def cosine_matrix(x):
    """C_ij = x_i^T x_j, clipped to [-1, 1]. (..., n, d) -> (..., n, n)."""
    return (x @ x.mT).clamp(-1, 1)


def antipolar_fraction(x, threshold=-0.9):
    """Share of the n(n-1)/2 pairs with cosine below the threshold, in [0, 1]. (..., n, d) -> (...)."""
    n = x.shape[-2]
    below = sum((x[..., rows, :] @ x[..., rows.start:, :].mT < threshold).triu_(1).sum((-2, -1)) for rows in row_blocks(x))
    return below / max(1, n * (n - 1) / 2) + 0 * x.sum((-2, -1))  # nan where a token is not finite


def angular_diameter(x):
    """D = max_ij arccos(x_i^T x_j), radians, in [0, pi]. (..., n, d) -> (...).

    The farthest pair is found from squared distances of the centred rows (one Gram matrix, in blocks), and its angle is
    2 atan2(||x_i - x_j||, ||x_i + x_j||): accurate to rounding near 0, where arccos loses half the digits. Near pi distances
    differ too little to tell the farthest pair from the next: in float32 D may be 5e-4 too small there.
    """
    y = x - x.mean(-2, keepdim=True)  # distances keep their digits when all tokens are nearly equal
    square = (y * y).sum(-1)
    best, row, column = torch.full_like(square[..., 0], -1), 0, 0
    for rows in row_blocks(x):
        # |y_i - y_j|^2 = |y_i|^2 + |y_j|^2 - 2 y_i^T y_j, for j >= first row of the block
        product = (-2 * y[..., rows, :]) @ y[..., rows.start:, :].mT
        distance = product.add_(square[..., None, rows.start:]).add_(square[..., rows, None])
        value, i = distance.amax(-1).max(-1)
        j = distance.gather(-2, i[..., None, None].expand(*i.shape, 1, distance.shape[-1]))[..., 0, :].argmax(-1)
        better = (value > best) | value.isnan()
        best = torch.where(better, value, best)
        row, column = torch.where(better, i + rows.start, row), torch.where(better, j + rows.start, column)
    a, b = (x.gather(-2, k[..., None, None].expand(*k.shape, 1, x.shape[-1]))[..., 0, :] for k in (row, column))
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)) + 0 * best  # nan where a token is not finite


def cosine_entropy(x):
    """-sum_k p_k log p_k, nats, p the eigenvalues of C/n, C the cosine matrix. (..., n, d) -> (...).

    0 when all tokens agree up to sign, log min(n, d) at best. C and x^T x share their nonzero eigenvalues, so the smaller
    of the two is taken. For unit rows the trace is 1; p is renormalised, so that other rows give a distribution too.
    """
    n, d = x.shape[-2:]
    x = x.float() if x.dtype.itemsize < 4 else x  # LAPACK has no 16 bits
    gram = x @ x.mT if n < d else x.mT @ x
    lost = ~gram.isfinite().all(-1).all(-1)  # nan where a token is not finite
    p = torch.linalg.eigvalsh(gram.masked_fill(lost[..., None, None], 0)).clamp_min(0)
    p = p / p.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    return torch.special.entr(p).sum(-1).masked_fill(lost, math.nan)


def effective_rank(x):
    """exp(cosine_entropy), in [1, min(n, d)]: the number of directions in use. After Roy and Vetterli 2007."""
    return cosine_entropy(x).exp()


def spherical_kmeans(x, k, iters=50, restarts=4, generator=None):
    """k-means by cosine on unit rows (Dhillon and Modha 2001), k-means++ start, best of `restarts`.

    (..., n, d) -> centres (..., k, d), labels (..., n), mean cosine of the tokens to their centre (...). ValueError unless
    1 <= k <= n.
    """
    *lead, n, d = x.shape
    if not 1 <= k <= n:
        raise ValueError(f"k must be from 1 to the number of tokens, {n}, not {k}")
    generator = generator or torch.Generator(x.device).manual_seed(0)
    tokens = x.reshape(-1, 1, n, d).expand(-1, restarts, n, d)  # (B, R, n, d)
    problems = tokens.shape[:2]
    pick = torch.randint(n, (*problems, 1), generator=generator, device=x.device)
    centres = tokens.gather(2, pick[..., None].expand(*problems, 1, d))
    cosine = tokens @ centres.mT  # (B, R, n, k so far)
    for _ in range(k - 1):  # k-means++: the next centre is a token, drawn with weight (distance to its nearest centre)^2
        weight = (1 - cosine.amax(-1)).clamp_min(0) + 1e-12
        pick = torch.multinomial(weight.flatten(0, 1), 1, generator=generator).view(*problems, 1)
        new = tokens.gather(2, pick[..., None].expand(*problems, 1, d))
        centres, cosine = torch.cat((centres, new), 2), torch.cat((cosine, tokens @ new.mT), 3)
    labels = cosine.argmax(-1)
    for _ in range(iters):
        total = torch.zeros_like(centres).scatter_add_(2, labels[..., None].expand_as(tokens), tokens)
        norm = total.norm(dim=-1, keepdim=True)
        centres = torch.where(norm > 1e-6, total / norm.clamp_min(1e-6), centres)  # an empty cluster stays where it was
        cosine = tokens @ centres.mT
        old, labels = labels, cosine.argmax(-1)
        if torch.equal(old, labels):
            break
    score, best = cosine.amax(-1).mean(-1).max(-1)  # (B,)
    first = torch.arange(len(best), device=x.device)
    return (centres[first, best].view(*lead, k, d), labels[first, best].view(*lead, n), score.view(lead))


def cluster_count(x, threshold=0.9, **options):
    """Smallest k whose spherical k-means has mean cosine >= threshold. (..., n, d) -> k (...), curve (..., K).

    curve[..., k - 1] is the mean cosine with k clusters, up to the largest k that any leading index needed.
    options go to spherical_kmeans. k = n always suffices, where a restart finds all n tokens.
    """
    curve = []
    for k in range(1, x.shape[-2] + 1):
        curve.append(spherical_kmeans(x, k, **options)[2])
        reached = torch.stack(curve, -1) >= threshold
        if reached.any(-1).all():
            break
    return torch.where(reached.any(-1), reached.int().argmax(-1) + 1, x.shape[-2]), torch.stack(curve, -1)


def by_layer(states):
    """What is followed through depth, lists of one float a layer: {"diameter_by_layer" (radians), "entropy_by_layer" (nats),
    "antipolar_by_layer", "clusters_by_layer"}, means over the sequences.

    states: a list of (B, n, d), rows of any length; nan where one is not finite. k-means costs most: clusters are counted in
    the first two sequences, among at most 64 tokens, evenly spread. In float32, under autocast too.
    """
    with torch.autocast("cpu", enabled=False):
        states = [torch.nn.functional.normalize(x.float().cpu(), dim=-1) for x in states]  # eigvalsh is not on every device
        few = torch.stack([x[:2, ::-(-x.shape[1] // 64)] for x in states])  # (layers, 2, <= 64, d)
        clusters = cluster_count(few.nan_to_num(), restarts=2, iters=20)[0] + 0 * few.sum((-2, -1))
        return {"diameter_by_layer": [angular_diameter(x).mean().item() for x in states],
                "entropy_by_layer": [cosine_entropy(x).mean().item() for x in states],
                "antipolar_by_layer": [antipolar_fraction(x).mean().item() for x in states],
                "clusters_by_layer": clusters.mean(-1).tolist()}


def dobrushin(A):
    """Dobrushin's ergodic coefficient, max_ij (1/2) sum_k |A_ik - A_jk|, in [0, 1]. (..., n, n) -> (...).

    The contraction of averaging: diam(A x) <= dobrushin(A) diam(x) in any norm, for rows that sum to 1.
    """
    return torch.stack([torch.cdist(A[..., rows, :], A, p=1).amax((-2, -1)) for rows in row_blocks(A)]).amax(0) / 2


def mixing_envelope(beta, t):
    """(1 - exp(-2 beta))^t, beta >= 0: without a mask, the most that t averaging steps leave of the diameter."""
    if not beta >= 0:
        raise ValueError(f"beta must be >= 0, not {beta}")
    return (1 - math.exp(-2 * beta)) ** t


def grad_norm_stats(norms):
    """Mean, variance (unbiased) and coefficient of variation of global gradient norms, a sequence of floats."""
    norms = torch.as_tensor(norms, dtype=torch.float64)
    mean, var = norms.mean(), norms.var(correction=1) if len(norms) > 1 else torch.zeros(())
    return {"mean": mean.item(), "var": var.item(), "cv": (var.sqrt() / mean).item()}


def spread(rows, key):
    """Mean and standard deviation over the seeds of what is finite; None without a value, and a deviation without two."""
    values = [row[key] for row in rows if row.get(key) is not None and math.isfinite(row[key])]
    if not values:
        return None, None
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if values[1:] else None


# Student's t, two-sided 95%, by degrees of freedom
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def mean_interval(values):
    """Mean of two or more independent values, a sequence of floats, and half the width of its 95% interval (Student)."""
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, T95[min(len(values) - 1, 9)] * math.sqrt(variance / len(values))


def paired_verdict(claim, ours, theirs):
    """Is ours below theirs, run by run on the same seeds? From the 95% interval of the mean paired difference.

    holds: the interval lies below zero; does not hold: above it; not decided: it holds zero, or there are fewer than three
    pairs, or a run diverged (None): those that are left would speak for an arm at its best. ValueError for lists of
    different lengths.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{claim}: {len(ours)} runs against {len(theirs)}; pairs need the same seeds on both sides")
    pairs = [a - b for a, b in zip(ours, theirs) if a is not None and b is not None]
    if len(pairs) < max(3, len(ours)):
        lost = "fewer than three seeds" if len(pairs) == len(ours) else "the other runs diverged"
        return {"claim": claim, "measured": f"differences {[round(p, 4) for p in pairs]}, {lost}", "verdict": "not decided"}
    mean, half = mean_interval(pairs)
    verdict = "holds" if mean + half < 0 else "does not hold" if mean - half > 0 else "not decided"
    return {"claim": claim, "measured": f"mean difference {mean:+.4f} +- {half:.4f} (95%, {len(pairs)} pairs)",
            "difference": mean, "half_width": half, "pairs": pairs, "verdict": verdict}


def perturbation_robustness(evaluate, x, noise=(), sign=(), generator=None):
    """Change of loss and accuracy when the inputs are moved: Gaussian noise of standard deviation s for s in noise, and
    one step x + s sign(dloss/dx) for s in sign (Goodfellow et al., arXiv 1412.6572).

    evaluate(x) -> (loss, accuracy), 0-dim tensors, differentiable in x. Returns {"clean": {loss, accuracy},
    "noise": {s: {loss, accuracy}}, "sign": {...}} with the changes as floats, loss in evaluate's unit.
    """
    leaf = x.detach().requires_grad_()
    loss, accuracy = evaluate(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)

    @torch.no_grad()
    def change(moved):
        new_loss, new_accuracy = evaluate(moved)
        return {"loss": (new_loss - loss).item(), "accuracy": (new_accuracy - accuracy).item()}

    generator = generator or torch.Generator(x.device).manual_seed(0)
    z = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    return {"clean": {"loss": loss.item(), "accuracy": accuracy.item()},
            "noise": {s: change(x + s * z) for s in noise},
            "sign": {s: change(x + s * gradient.sign()) for s in sign}}


@torch.no_grad()
def mean_loss(model, batches):
    """Mean of model(inputs, targets)[1] over all samples of batches, (inputs, targets) of any sizes: nats, a float."""
    sizes, losses = zip(*((len(inputs), model(inputs, targets)[1]) for inputs, targets in batches))
    sizes = torch.tensor(sizes, dtype=torch.float64)
    return (torch.stack(losses).cpu().double() @ sizes / sizes.sum()).item()


def unigram_entropy(ids):
    """-sum_k p_k log p_k, nats, p the frequencies of the ids (integers >= 0, any shape): the least loss that predictions
    can have which see nothing of the context. () float64."""
    return torch.special.entr(torch.bincount(ids.flatten()).double() / ids.numel()).sum()


def bits_per_byte(nats_per_token, tokens, n_bytes):
    """Cross entropy in bits per byte of the text that the tokens stand for: comparable between tokenisers."""
    return nats_per_token * tokens / n_bytes / math.log(2)


def transformer_flops(weights, tokens, context, dim, layers):
    """Floating-point operations of a training step by the usual formula (Kaplan et al., arXiv 2001.08361): 6 for each matrix
    entry and token (2 forward, 4 backward), and 12 T d for each token and layer in attention, T = context. count_flops
    counts the same as it runs."""
    return tokens * (6 * weights + 12 * layers * context * dim)


def count_flops(step):
    """Floating-point operations of step(), forward and backward as it runs, by torch.utils.flop_counter: matrix products
    and attention, a multiplication and an addition counted as two; element-wise work is not counted. Attention is spelled
    out for the count, since the counter does not know every fused kernel; a causal mask saves nothing there."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()
