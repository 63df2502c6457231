"""
The Lie-Trotter torsion interferometer: attention then FFN against FFN then attention, and the Lie bracket between them.

    delta(a) = a R(x + a T(x)) + a T(x) - a T(x + a R(x)) - a R(x)         two orders of one step of size a
    B = [T, R](x) = DR(x)[T(x)] - DT(x)[R(x)]                              perturbed at every position at once
    delta(a) / a^2 -> B as a -> 0, error O(a)                              Taylor: true of any two smooth maps
    E(x) = x_exact(1) - (x + T + R o (x + T))  ~  (DT[T] + DR[R] - B) / 2      x' = T(x) + R(x), weights frozen (Eq. 59)

    symbol       variable        shape
    x            x               (b, n, d)    stream at a block's input, random tokens
    T(x), R(x)   t, r            (b, n, d)    what attention and FFN add, their norms included
    DR[T]        dr_t            (b, n, d)    torch.func.jvp, so no Jacobian is ever stored
    B            bracket         (b, n, d)
    delta        delta(a)        (b, n, d)
    cos          cosine()        (b, p)       at p positions, written out: library cosines floor small norms

Source: paper Sec. VI.2, Theorem 11, Eqs. 58 and 59, Tables 4 to 6. Protocol as printed: random tokens, n = 128, 16
positions, layers spread evenly from 2 to the last (2, 5, ..., 27 of 28), a from 1 to 0.001, here down to 1e-5, in
float64 throughout. The paper takes each Jacobian at one token: DT then misses the other tokens' motion, and that
"per-token" bracket is measured beside the true one. Controls: a random direction, another token's bracket, one term of
the bracket alone, and the same network with the entries of every weight matrix shuffled, which keeps sizes and forgets
training.

    python geometry/torsion.py                    micro: 10 seconds on two CPU cores (and once a minute to train it)
    python geometry/torsion.py --model smollm2    1.5 minutes on two CPU cores
Expect delta/a^2 to meet B to 1e-4 or better at a = 1e-5 in every layer, trained or shuffled (it is algebra).
"""
import dataclasses

import torch

import models

ALPHAS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001, 1e-4, 1e-5)  # the paper stops at 0.001
PAPER = dict(qwen3=dict(median=0.793, mean=0.717, last=0.112, ratio_at_1=5.44 / 43.17),
             gpt2=dict(median=0.842, mean=0.623, last=-0.188, ratio_at_1=12.72 / 40.34))


def cosine(a, b):
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))


def derivative(f, x, v):  # Df(x)[v]
    return torch.func.jvp(f, (x,), (v,))[1]


def bracket_terms(T, R, x):
    """(DR[T], DT[R]) at x, each (..., n, d); their difference is the paper's bracket [T, R]."""
    return derivative(R, x, T(x)), derivative(T, x, R(x))


def deviation(T, R, x, a):
    """delta(a): attention first minus FFN first, both from x with step a."""
    t, r = T(x), R(x)
    return a * R(x + a * t) + a * t - a * T(x + a * r) - a * r


def per_token_bracket(T, R, x, positions):
    """The paper's version: at each position the Jacobians see that token's motion alone. x (n, d) -> (p, d)."""
    t, r, out = T(x), R(x), []
    for p in positions:
        alone = torch.zeros_like(x[:p + 1])
        alone[p] = r[p]  # causal: later tokens have no part in T at p
        out.append(derivative(R, x[p:p + 1], t[p:p + 1])[0] - derivative(T, x[:p + 1], alone)[p])
    return torch.stack(out)


def exact_flow(f, x, steps):  # x' = f(x) for unit time, Runge-Kutta 4
    h = 1 / steps
    for _ in range(steps):
        k1 = f(x)
        k2 = f(x + h / 2 * k1)
        k3 = f(x + h / 2 * k2)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(x + h * k3))
    return x


def shuffle_weights(model, seed):
    """The same blocks, the entries of each matrix in random order. Norms and embeddings stay."""
    g = torch.Generator().manual_seed(seed)

    def mix(pair):
        w, b = pair
        return w.flatten()[torch.randperm(w.numel(), generator=g)].view_as(w), b

    return dataclasses.replace(model, blocks=[dataclasses.replace(b, **{
        name: mix(getattr(b, name)) for name in ("q", "k", "v", "o", "gate", "up", "down") if getattr(b, name)})
        for b in model.blocks])


def alignment(model, layers, ids, positions):
    """cos(delta(1), B) per layer: (layers, b, p); and the worst cos(delta/a^2, B) at a = 1e-5."""
    states, at_one, limit = model.states(ids), [], 1.0
    for layer in layers:
        block, x = model.blocks[layer], states[layer]
        dr_t, dt_r = bracket_terms(block.T, block.R, x)
        bracket = (dr_t - dt_r)[:, positions]
        at_one.append(cosine(deviation(block.T, block.R, x, 1.0)[:, positions], bracket))
        limit = min(limit, cosine(deviation(block.T, block.R, x, 1e-5)[:, positions], bracket).min().item())
    return torch.stack(at_one), limit


def main():
    parser = models.parser(__doc__)
    parser.add_argument("--length", type=models.number(int, low=2), help="tokens in a sequence (default 128)")
    args = parser.parse_args()
    model = models.load(args)
    if args.dtype == "float32":
        raise models.UserError("torsion needs --dtype float64: at a = 1e-5 the deviation is 1e-10 of the stream")
    last = len(model.blocks) - 1
    n, b = args.length or (32 if args.quick else 128), 3
    layers = models.spread_layers(min(2, last), last, 8 if last >= 16 else 6)
    if len(layers) < 2:
        raise models.UserError(f"torsion compares the layers from the third on with the last: {model.name} has "
                               f"{last + 1} blocks, take a model of 4 or more")
    alphas = (1.0, 0.1, 0.01, 1e-3, 1e-5) if args.quick else ALPHAS
    count = min(16, n)
    positions = [(i + 1) * n // count - 1 for i in range(count)]  # evenly spaced, the last token included
    ids = model.random_tokens(b, n, seed=args.seed)
    states = model.states(ids)
    g = torch.Generator().manual_seed(args.seed + 1)
    interior = slice(0, len(layers) - 1)

    keep = lambda v: v[:, positions]  # noqa: E731
    rows, cos, other, ffn_term, attn_term, local, random = [], [], [], [], [], [], []
    error, size, previous, self_cos, local_limit, ratio, reach = [], [], None, [], [], [], []
    for layer in layers:
        block, x = model.blocks[layer], states[layer]
        T, R = block.T, block.R
        t, r = T(x), R(x)
        dr_t, dt_r = bracket_terms(T, R, x)
        bracket, delta1 = keep(dr_t - dt_r), keep(deviation(T, R, x, 1.0))
        cos.append(cosine(delta1, bracket))
        other.append(cosine(delta1, bracket.roll(1, 1)))
        ffn_term.append(cosine(delta1, keep(dr_t)))
        attn_term.append(cosine(delta1, -keep(dt_r)))
        random.append(cosine(delta1, torch.randn(delta1.shape, generator=g, dtype=x.dtype)).abs())
        single = per_token_bracket(T, R, x[0], positions)
        local.append(cosine(delta1[0], single))
        ratio.append(delta1.norm(dim=-1) / bracket.norm(dim=-1))
        reach.append((keep(t).norm(dim=-1) + keep(r).norm(dim=-1)) / keep(x).norm(dim=-1))

        # a -> 0: direction, magnitude, and what the paper looked at instead, agreement of neighbours
        previous, err, siz, same = None, [], [], []
        for a in alphas:
            scaled = keep(deviation(T, R, x, a)) / a ** 2
            err.append(((scaled - bracket).norm(dim=-1) / bracket.norm(dim=-1)).median().item())
            siz.append((scaled.norm(dim=-1) / bracket.norm(dim=-1)).median().item())
            same.append(1.0 if previous is None else cosine(scaled, previous).median().item())
            previous = scaled
        error.append(err), size.append(siz), self_cos.append(same)
        local_limit.append(cosine(previous[0], single))

        # Eq. 59: how big is each part of the splitting error, and which way does the error itself point?
        one = x[:1]
        advect = derivative(T, one, t[:1]) + derivative(R, one, r[:1])
        flow = lambda v: T(v) + R(v)  # noqa: E731
        coarse, fine = (exact_flow(flow, one, k) for k in ((4, 8) if args.quick else (8, 16)))
        trotter = one + t[:1] + R(one + t[:1])
        split, half = keep(fine - trotter), keep(advect - (dr_t - dt_r)[:1]) / 2
        shift = torch.full_like(one, torch.nan)  # parameter drift, by one-layer difference; the last has no next
        if layer < last:
            shift = model.blocks[layer + 1].T(one) + model.blocks[layer + 1].R(one) - t[:1] - r[:1]
        med = lambda v: v.median().item()  # noqa: E731
        rows.append(dict(
            layer=layer, mean=cos[-1].mean().item(), median=med(cos[-1]), min=cos[-1].min().item(),
            max=cos[-1].max().item(), bracket_norm=med(bracket.norm(dim=-1)), reach=med(reach[-1]),
            advection_norm=med(keep(advect).norm(dim=-1)), parameter_norm=med(keep(shift).norm(dim=-1)),
            split_norm=med(split.norm(dim=-1)), cos_split_torsion=med(cosine(split, -bracket[:1])),
            cos_split_advection=med(cosine(split, keep(advect))), cos_split_eq59=med(cosine(split, half)),
            flow_error=med(keep(fine - coarse).norm(dim=-1) / split.norm(dim=-1))))
    cos, other, ffn_term, attn_term, random, ratio, reach = map(
        torch.stack, (cos, other, ffn_term, attn_term, random, ratio, reach))  # each (layers, b, p)
    local, local_limit = torch.stack(local), torch.stack(local_limit)  # (layers, p)

    shuffled = [alignment(shuffle_weights(model, args.seed + 10 + s), layers, ids[:1], positions) for s in range(3)]
    null_medians = [c[interior].median().item() for c, _ in shuffled]
    seeds = [cos[interior, s].median().item() for s in range(b)]

    models.table("Table 4: cos(delta(1), bracket)", ("layer", "mean", "median", "min", "max", "(|T|+|R|)/|x|"),
                 [[r["layer"], r["mean"], r["median"], r["min"], r["max"], r["reach"]] for r in rows])
    models.table("Table 5 and past it: medians over positions, worst and best layer", (
        "a", "|delta|/a^2/|B|", "|delta/a^2 - B|/|B|", "cos of neighbours"),
        [[f"{a:.0e}", *(f"{min(v[i] for v in m):.6g} to {max(v[i] for v in m):.6g}" for m in (size, error, self_cos))]
         for i, a in enumerate(alphas)])
    models.table("Null controls: median cos with delta(1), interior layers", ("direction", "median"), [
        ["the bracket", cos[interior].median().item()], ["paper's per-token bracket", local[interior].median().item()],
        ["DR[T] alone", ffn_term[interior].median().item()], ["-DT[R] alone", attn_term[interior].median().item()],
        ["another token's bracket", other[interior].median().item()],
        ["random, absolute", random[interior].median().item()],
        ["the bracket, shuffled weights", ", ".join(f"{v:.3f}" for v in null_medians)]])
    models.table("Eq. 59: median sizes, and cos with the true splitting error E", (
        "layer", "torsion", "advection", "weights", "|E|", "cos E,-B", "cos E,adv", "cos E,Eq.59", "flow error"),
        [[r["layer"], r["bracket_norm"], r["advection_norm"], r["parameter_norm"], r["split_norm"],
          r["cos_split_torsion"], r["cos_split_advection"], r["cos_split_eq59"], r["flow_error"]] for r in rows])

    median, last_median = cos[interior].median().item(), rows[-1]["median"]
    worst = min(rows[interior], key=lambda r: r["median"])
    lowest = f"lowest layer {worst['layer']}: {worst['median']:.3f}"
    chance = random[interior].median().item()
    own = (cos[interior] > other[interior]).double().mean().item()
    bar, excess = max(0.5, 5 * chance), max(median - chance, 1e-9)
    gain = min(seeds) - max(null_medians), max(seeds) - min(null_medians)  # what shuffling loses, at least and at most
    worst_error, worst_size = max(e[-1] for e in error), max(abs(s[-1] - 1) for s in size)
    order = [(torch.tensor(e[-3]) / e[-2]).log10().item() / (torch.tensor(alphas[-3]) / alphas[-2]).log10().item()
             for e in error]  # 1 when the error is O(a)
    limit_ok = worst_error < 1e-3 and worst_size < 1e-3
    null_limit = min(limit for _, limit in shuffled)
    dominant = [r["layer"] for r in rows[interior] if r["bracket_norm"] > max(r["advection_norm"], r["parameter_norm"])
                and r["cos_split_torsion"] > r["cos_split_advection"]]
    rank = lambda v: v.flatten().argsort().argsort().double()  # noqa: E731
    spearman = torch.corrcoef(torch.stack((rank(cos), rank(reach))))[0, 1].item()
    yes = lambda good: "holds" if good else "does not hold"  # noqa: E731
    claims = [
        dict(claim="delta(1) is aligned with the bracket", paper="median 0.793, 0.842", theory="1 if T, R were affine",
             ours=f"interior median {median:.3f}, {lowest}",
             null=f"shuffled {min(null_medians):.3f} to {max(null_medians):.3f}, chance {chance:.3f}",
             verdict="does not hold" if median <= bar else
             "holds trivially (algebra)" if min(null_medians) > bar else
             "holds" if max(null_medians) < 5 * chance else "not decided",
             rule="does not hold unless the interior median is above 0.5 and 5 times chance (median |cos| with a "
                  "random direction); then trivially if three networks of shuffled weights all pass the same bar, "
                  "holds if all three stay below 5 times chance, else not decided",
             would_change="shuffled networks near chance would make the alignment a fact about training"),
        dict(claim="it is this token's bracket", paper="not asked", theory="1 as a -> 0",
             ours=f"{100 * own:.0f}% closer",
             null=f"another token's: median {other[interior].median().item():.3f}", verdict=yes(own > 0.95),
             rule="cos(delta, B) exceeds cos(delta, the bracket at the sampled position before; the first takes the "
                  "last's) at 95% of interior points",
             would_change="brackets that all tokens share"),
        dict(claim="training made the alignment", paper="not asked", theory="none",
             ours=f"{min(seeds):.3f} to {max(seeds):.3f}",
             null=f"shuffling the weights loses {100 * gain[0] / excess:.0f}% to {100 * gain[1] / excess:.0f}% of it",
             verdict="not decided" if median <= bar else "does not hold" if gain[1] < 0.1 * excess else
             "holds" if gain[0] > 0.5 * excess else "not decided",
             rule="not decided without an alignment (the first line's bar); holds if shuffling the weights loses more "
                  "than half of the median's excess over chance, for every pair of a token seed (three) and a shuffle "
                  "(three); does not hold if it never loses a tenth; else not decided",
             would_change="shuffled networks that lose a tenth of it, or half"),
        dict(claim="delta/a^2 -> bracket, direction and size", paper="neighbours agree, 0.9997", theory="error O(a)",
             ours=f"error {worst_error:.1e} at {alphas[-1]:.0e}", null=f"shuffled: cos {null_limit:.8f}",
             verdict="does not hold" if not limit_ok else
             "holds trivially (algebra)" if null_limit > 0.999 else "holds",
             rule="median |delta/a^2 - B|/|B| and size ratio off by < 1e-3 in every layer at the smallest a; trivially "
                  "if a shuffled network does it too",
             would_change="a map that is not smooth at the scale a |T|"),
        dict(claim="per-token Jacobians give that limit", paper="used throughout", theory="no: DT misses other tokens",
             ours=f"cos {local_limit.median().item():.3f}, worst {local_limit.min().item():.3f}",
             null="true bracket: 1",
             verdict=yes(local_limit.median().item() > 0.999), rule="holds if the median cos at the smallest a > 0.999",
             would_change="attention that only looks at the token itself"),
        dict(claim="the bracket measures delta(1)", paper="|delta|/a^2: 5.4 at 1, 43 at 0", theory="1 if affine",
             ours=f"|delta(1)|/|B| {ratio[interior].median().item():.3f}", null="none needed",
             verdict=yes(0.5 < ratio[interior].median().item() < 2),
             rule="holds if the interior median of |delta(1)|/|B| is within a factor 2 of 1",
             would_change=f"smaller steps: rank correlation of cos with (|T|+|R|)/|x| is {spearman:+.2f}"),
        dict(claim="torsion dominates the splitting error", paper="dominant generator", theory="one of 3 terms",
             ours=f"{len(dominant)} of {len(layers) - 1} interior layers", null="advection and weight terms, Eq. 59",
             verdict=yes(len(dominant) > (len(layers) - 1) / 2),
             rule="in most interior layers |B| is the largest of the three terms, and the true error (weights frozen) "
                  "points along -B more than along the self-advection",
             would_change="larger brackets than self-advection"),
        dict(claim="alignment collapses in the last layer", paper="0.112, -0.188", theory="none at a block",
             ours=f"{last_median:.3f}", null=f"interior median {median:.3f}, {lowest}",
             verdict=yes(last_median < 0.5 * median),
             rule="the last layer's median is below half of the interior median (the paper's mean in the last is at "
                  "0.14 of its overall median, and below 0)", would_change="a last layer below that half")]
    protocol = dict(tokens="uniform over the alphabet", sequences=b, length=n, positions=positions, layers=layers,
                    alphas=alphas, shuffles=3, per_token_and_Eq59="first sequence", paper=PAPER)
    numbers = dict(layers=rows, cos=cos.tolist(), per_token=local.tolist(), per_token_limit=local_limit.tolist(),
                   error=error, size=size, neighbours=self_cos, order_of_error=order, seeds=seeds,
                   shuffled=null_medians, shuffled_limit=null_limit, chance=chance, own_closer=own,
                   size_at_1=ratio.median(-1).values.tolist(),
                   medians={name: v[interior].median().item() for name, v in dict(
                       ffn_term=ffn_term, attn_term=attn_term, other_token=other, random=random,
                       per_token=local).items()},
                   spearman_cos_reach=spearman)

    def figure():
        fig, (left, right) = models.figure_axes(2)
        left.boxplot([c.flatten().numpy() for c in cos], positions=range(len(layers)), widths=0.5, showfliers=False,
                     medianprops=dict(color="k"))
        for s, (c, _) in enumerate(shuffled):
            left.plot([v.median().item() for v in c], "kx", label="shuffled weights, median" if s == 0 else None)
        left.plot([v.median().item() for v in other], "k^", mfc="none", label="another token's bracket, median")
        left.axhline(model.d ** -0.5, ls=":", color="k", label="1/sqrt(d)")
        left.set(xlabel="layer", ylabel="cos(delta(1), bracket)", title=f"{model.name}: step 1")
        left.set_xticks(range(len(layers)), layers)
        left.legend(fontsize=6)
        for marker, layer, e in zip("os^Dv<>*", layers, error):
            right.loglog(alphas, e, marker + "-", ms=3, lw=0.7, mfc="none", color="k", label=f"layer {layer}")
        right.loglog(alphas, [error[0][-1] * a / alphas[-1] for a in alphas], "--", color="0.6", label="slope 1")
        right.set(xlabel="step a", ylabel="|delta/a^2 - bracket| / |bracket|", title="a -> 0")
        right.legend(fontsize=6)
        return fig

    models.report(args, model, "torsion", "paper Sec. VI.2", protocol, numbers, claims, figure)


if __name__ == "__main__":
    models.run_main(main)
