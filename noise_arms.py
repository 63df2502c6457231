"""
The experiment that train_wikitext.py and train_cifar_patches.py share: one 6-layer Transformer, seven arms on the same
batches, with the same parameters and steps, and what is measured of each.

    prenorm       x <- x + f(norm(x))                         no noise
    dropout       the same, residual dropout
    sphere        x <- normalize(x + (1/L) P_x f(norm(x)))    no noise
    isotropic     sphere, then IsotropicNoise of the tangent arm's E||dx||^2
    tangent       sphere, then TangentNoise(h, gamma): the note's block
    shared        its one half: the shared A alone (gamma = 0)
    independent   its other half: the vectors z_i alone (a = 0)

Noise budget a layer: E||dx||^2 = (d - 1)(a^2 + gamma^2 h), a = h: the note's own step, h = 1/L, moves a unit token by
(d - 1)^(1/2)/L, that is by 1.9 at d = 128 and L = 6, and leaves nothing of it. The default h is small for that reason, and
--sweep shows both ends.

Source: the note "Tangent Brownian symmetry breaking", section 4.
"""
import json

import torch

import harness
import metrics
from harness import UserError
from noise_block import IsotropicNoise, TangentNoise, matched_sigma, step_sizes, unit

ARMS = ("prenorm", "dropout", "sphere", "isotropic", "tangent", "shared", "independent")
GAMMAS = (1e-3, 3e-3, 1e-2, 3e-2)


def steps_of(layers):
    """The values of h in the sweep: matched to the residual scale, 1/L and 1/sqrt(2L), and two that are small."""
    return tuple(dict.fromkeys((1 / layers, (2 * layers) ** -0.5, 0.03, 0.01)))  # L = 2 makes two of them equal


def add_options(parser):
    at_least_0 = harness.number(float, low=0)
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM", default=list(ARMS),
                        help=f"among {', '.join(ARMS)} (default: %(default)s)")
    parser.add_argument("--gamma", type=at_least_0, default=0.03, help="amplitude of the tokens' own noise "
                        "(default: %(default)s)")
    parser.add_argument("--h", type=at_least_0, default=0.01, help="depth step of the noise (default: %(default)s)")
    parser.add_argument("--rank", type=harness.number(int, low=0), default=8, help="rank of the shared A; 0 is the full "
                        "matrix (default: %(default)s)")
    parser.add_argument("--common", choices=("h", "sqrt_h"), default="h", help="the shared part's step a: h is the note's, "
                        "sqrt_h the diffusion limit (default: %(default)s)")
    parser.add_argument("--dropout", type=at_least_0, default=0.1, help="of the dropout arm (default: %(default)s)")
    parser.add_argument("--equal", choices=("steps", "flops"), default="steps", help="what the arms have the same of; with "
                        "flops an arm whose step costs more gets fewer (default: %(default)s)")
    parser.add_argument("--sweep", action="store_true", help=f"tangent and isotropic at gamma in {GAMMAS} and h in 1/L, "
                        "1/sqrt(2L), 0.03, 0.01, beside the arms without noise; finished points are kept")
    parser.add_argument("--shard", metavar="i/N", help="do only each N-th run, from the i-th on (0 <= i < N)")


def check_options(args):
    harness.check_common(args)
    if args.rank > args.dim:
        raise UserError(f"--rank {args.rank} must not exceed --dim {args.dim}; 0 is the full matrix")
    if args.sweep and not {"shared", "independent"}.isdisjoint(args.arms) and set(args.arms) != set(ARMS):
        raise UserError("--sweep has no arms shared and independent: leave them out of --arms")
    if args.dropout >= 1:
        raise UserError(f"--dropout {args.dropout} must be below 1")
    args.part, args.parts = 0, 1
    if args.shard:
        part, slash, parts = args.shard.partition("/")
        if not (slash and part.isdigit() and parts.isdigit() and int(part) < int(parts)):
            raise UserError(f"--shard {args.shard}: write i/N with 0 <= i < N, for example 0/4")
        args.part, args.parts = int(part), int(parts)


def model_options(arm, args, seed, h, gamma):
    """What Transformer gets for this arm: arm, dropout, step, noise."""
    if arm in ("prenorm", "dropout"):
        return dict(arm="standard", dropout=args.dropout if arm == "dropout" else 0.0)

    def noise(layer):
        own = dict(seed=seed * 1000 + layer, name=f"noise of layer {layer}")
        if arm == "isotropic":
            return IsotropicNoise(args.dim, matched_sigma(args.dim, h, gamma, args.common), **own)
        if arm == "independent":
            return TangentNoise(args.dim, h, gamma, common="none", **own)
        if arm != "sphere":
            return TangentNoise(args.dim, h, gamma * (arm == "tangent"), rank=args.rank or None, common=args.common, **own)
    return dict(arm="sphere", step=1 / args.layers, noise=noise)


def points(args):
    """Every run of the command: (arm, h, gamma, seed). Without noise h and gamma are None."""
    grid = [(h, gamma) for h in steps_of(args.layers) for gamma in GAMMAS] if args.sweep else [(args.h, args.gamma)]
    noisy = [arm for arm in (("isotropic", "tangent") if args.sweep else ARMS[3:]) if arm in args.arms]
    found = []
    for seed in range(args.seed, args.seed + args.seeds):
        found += [(arm, None, None, seed) for arm in ARMS[:3] if arm in args.arms]
        found += [(arm, h, gamma, seed) for h, gamma in grid for arm in noisy]
    return found


def name_of(arm, h, gamma, seed):
    return f"{arm}-seed{seed}" + ("" if h is None else f"-h{h:.4g}-gamma{gamma:g}")


@torch.no_grad()
def turned(model, x):
    """E sin^2 of the angle by which one layer's noise turns the states in training mode; mean over the layers.

    y = (x + dx)/||x + dx||: with b = ||dx||^2 it is b/(1 + b) for tangent dx, and 1/d less for isotropic noise, of which a
    part lies along x. So it shows that the budgets E||dx||^2 match after the retraction as well, and how much they leave.
    """
    model.train()
    x, tables = model.start(x)
    found = []
    for block in model.stack():
        noise, block.noise = block.noise, None
        x = block(x, tables)
        block.noise = noise
        cosine = (unit(x) * unit(noise(x))).sum(-1).clamp(-1, 1)
        found.append((1 - cosine ** 2).mean().item())
    model.eval()
    return sum(found) / len(found)


def formula_flops(model, args, arm, batch, context):
    """metrics.transformer_flops, and of the noise a token and layer: A x and its derivative in x, each 2 d^2, or 8 d r."""
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    product = 4 * args.dim ** 2 if args.rank == 0 else 16 * args.dim * args.rank
    noise = args.layers * product if arm in ("tangent", "shared") else 0
    return metrics.transformer_flops(weights, batch * context, context, args.dim, args.layers) + batch * context * noise


def embedding_robustness(model, ids, targets):
    """Rise of the loss, nats, under noise on the embedded tokens and under one signed-gradient step, sizes over their RMS."""
    x = model.embed(ids).detach()
    size = x.square().mean().sqrt().item()
    noise, sign = (0.1, 0.3, 1.0), (0.03, 0.1)
    moved = metrics.perturbation_robustness(lambda z: model.score(z, targets), x, [s * size for s in noise],
                                            [s * size for s in sign])
    return ({f"noise_{s}": moved["noise"][s * size]["loss"] for s in noise} |
            {f"sign_{s}": moved["sign"][s * size]["loss"] for s in sign})


def run_all(args, out, device, dtype, header, lr, make_model, batch, evaluate, embed, final):
    """All runs of this shard, each with its row.json.

    lr: peak learning rate of the two kinds of model, "standard" and "sphere", where --lr does not say;
    make_model(**options) -> model; batch(step, seed) -> (inputs, targets); evaluate(model) -> dict for the curve;
    embed(model) -> embedded evaluation tokens (B, T, d); final(model) -> dict of what is measured at the end.
    """
    todo = points(args)
    mine = todo[args.part::args.parts]
    inputs, targets = batch(0, args.seed)
    flops = {}  # counted and by the formula, per step, on a model that is not trained
    for arm in dict.fromkeys(arm for arm, *_ in todo):
        model = make_model(**model_options(arm, args, args.seed, args.h, args.gamma)).to(device)
        counted = metrics.count_flops(lambda: model(inputs, targets)[1].backward())
        flops[arm] = dict(flops_per_step=counted, flops_formula=formula_flops(model, args, arm, *inputs.shape[:2]))
    # equal FLOPs: an arm that costs more gets fewer steps
    least = min(each["flops_per_step"] for each in flops.values())
    steps = {arm: args.steps if args.equal == "steps" else max(1, round(args.steps * least / each["flops_per_step"]))
             for arm, each in flops.items()}
    progress = harness.Progress(sum(steps[arm] for arm, *_ in mine))
    for arm, h, gamma, seed in mine:
        name = name_of(arm, h, gamma, seed)
        folder = out / name
        torch.manual_seed(seed)
        model = make_model(**model_options(arm, args, seed, h, gamma))
        rate = harness.peak_lr(args, arm, lr[model.arm])
        result = harness.train(
            folder, model, lambda step: batch(step, seed), seed=seed, steps=steps[arm], lr=rate,
            header=dict(header, experiment_arm=arm, h=h, gamma=gamma, rank=args.rank, common=args.common,
                        dropout=args.dropout, layers=args.layers, dim=args.dim, heads=args.heads, batch=args.batch),
            device=device, dtype=dtype, eval_every=args.eval_every, compile=args.compile, progress=progress, label=name,
            evaluate=lambda model: evaluate(model) | metrics.by_layer(model.states(embed(model))))
        if (folder / "row.json").exists() or harness.RANK:
            continue
        row = dict(arm=arm, seed=seed, h=h, gamma=gamma, lr=rate, steps=steps[arm], **flops[arm], diverged=result["diverged"],
                   train_loss=result["train_loss_last"], best=result["best"])
        if not result["diverged"]:
            model.eval()
            stats = metrics.grad_norm_stats([g for g in result["grad_norms"][steps[arm] // 2:] if g is not None])
            row.update(grad_norm_mean=stats["mean"], grad_norm_var=stats["var"], grad_norm_cv=stats["cv"])
            row["evaluations"] = result["evaluations"]
            row.update(final(model), **{key: x for key, x in row["evaluations"][-1].items() if key.endswith("_by_layer")})
            for key in ("entropy", "antipolar", "clusters"):
                row[f"{key}_last"] = row[f"{key}_by_layer"][-1]
            if h is not None:
                a, g = step_sizes(h, gamma, args.common)
                part = {"shared": a * a, "independent": g * g}.get(arm, a * a + g * g)
                row["budget"], row["turned"] = (args.dim - 1) * part, turned(model, embed(model))
                model.train()
                row["noise_on"] = metrics.by_layer(model.states(embed(model)))  # the other *_by_layer are without it
                model.eval()
            curve = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
            row["loss_curve"] = [sum(part) / len(part) for part in (curve[i:i + 10] for i in range(0, len(curve), 10))]
        harness.write_json(folder / "row.json", row)
    progress.close()


def finished(args, out):
    """Rows of the runs that are done, of all shards, and whether these are all."""
    paths = [out / name_of(*point) / "row.json" for point in points(args)]
    rows = [harness.read_json(path) for path in paths if path.exists()]
    if len(rows) < len(paths):
        print(f"{len(rows)} of {len(paths)} runs are done; the verdicts come with the last one")
    return rows, len(rows) == len(paths)


def hypothesis(rows, metric, unit_, robust):
    """The note's claim, tangent against isotropic at the same budget, paired by seed: "reduced representation degeneracy and
    either improved validation performance or more stable loss curves". Its three parts, and the whole: it holds if the
    first and one of the others do, does not hold if the first or both others do not, else it is not decided."""
    def against(rival, claim, key, sign=1):
        ours, theirs = ([None if row.get(key) is None else sign * row[key] for row in rows if row["arm"] == arm]
                        for arm in ("tangent", rival))
        return metrics.paired_verdict(f"tangent {claim}", ours, theirs)
    arms = {row["arm"] for row in rows}
    found = [against(rival, f"has a lower {metric} than {rival}, {unit_}", metric)
             for rival in ("isotropic", "dropout", "sphere", "prenorm") if {"tangent", rival} <= arms]
    if not {"tangent", "isotropic"} <= arms:
        return found
    degeneracy, *control = [  # the control: sphere, the same model without noise
        against(rival, f"has a higher cosine entropy in the last layer than {rival} (shown negative)", "entropy_last", -1)
        for rival in ("isotropic", "sphere") if rival in arms]
    stable = against("isotropic", "has a lower variance of the gradient norm than isotropic", "grad_norm_var")
    better = found[0]["verdict"], stable["verdict"]
    if degeneracy["verdict"] == "holds" and "holds" in better:
        whole = "holds"
    elif degeneracy["verdict"] == "does not hold" or set(better) == {"does not hold"}:
        whole = "does not hold"
    else:
        whole = "not decided"
    firm = [against("isotropic", f"loses less than isotropic to perturbed inputs ({key})", key) for key in robust]
    return [*found, degeneracy, *control, stable, *firm,
            {"claim": "the note's hypothesis: less degenerate, and better or more stable, at the same budget",
             "measured": "from the verdicts on isotropic above", "verdict": whole}]


def experiment(args, device, dtype, name, columns, metric, unit_, robust, theory, header, **parts):
    """The whole command: folder, runs, table with mean and spread, figure, summary, verdicts.

    columns: {key of a row: (heading, format)}; metric: the key that decides, in unit_; robust: keys of what is lost to
    perturbed inputs; theory: nats that the figure shows as lines, loss without a look at the input, and the largest entropy.
    """
    out, lock = harness.open_folder(args.out, args.resume, name + ("-sweep" if args.sweep else ""), args.shard or "")
    with lock:
        config = harness.write_config(out, args, device)
        run_all(args, out, device, dtype, header, **parts)
    if harness.RANK:
        return
    extra = {"entropy_last": ("entropy", ".3f"), "antipolar_last": ("antipodal", ".4f"), "clusters_last": ("clusters", ".1f"),
             "grad_norm_var": ("var |grad|", ".3g"), "budget": ("E||dx||^2", ".3g"), "turned": ("E sin^2", ".3g")}
    shown = {"arm": ("arm", ""), "h": ("h", ".3g"), "gamma": ("gamma", "g"), "n": ("seeds", "d")}
    for key, (heading, spec) in columns.items():
        shown[key], shown[key + "_sd"] = (heading, spec), ("+-", spec)
    with open(out / ".turn", "a") as turn:  # shards that end together take turns: the last one makes the table of all rows
        harness.lock_file(turn, out, wait=True)
        rows, complete = finished(args, out)
        groups = {}
        for row in rows:
            groups.setdefault((row["arm"], row["h"], row["gamma"]), []).append(row)
        table = []
        for (arm, h, gamma), group in groups.items():
            line = {"arm": arm, "h": h, "gamma": gamma, "n": sum(not row["diverged"] for row in group)}
            for key in (*columns, *extra):
                line[key], line[key + "_sd"] = metrics.spread(group, key)
            table.append(line)
        print(harness.table(table, {**shown, **extra}))
        verdicts = hypothesis(rows, metric, unit_, robust) if complete and not args.sweep else []
        harness.write_json(out / "summary.json", {**config, **header, "complete": complete, "theory": theory,
                                                  "table": table, "runs": rows, "verdicts": verdicts})
        draw(out, rows, table, columns[metric][0], metric, theory)
        harness.print_verdicts(verdicts, out)


def draw(out, rows, table, label, metric, theory):
    """Training loss against FLOPs, and by layer entropy and antipodal share, one line an arm (first seed); the metric."""
    figure, axes = harness.figure_axes(3)
    first = {row["arm"]: row for row in reversed(rows) if not row["diverged"]}
    styles = ("k-", "k--", "k:", "k-.", "C7-", "C7--", "C7:")
    for (arm, row), style in zip([(arm, first[arm]) for arm in ARMS if arm in first], styles):
        flops = [row["flops_per_step"] * min(10 * (i + 1), row["steps"]) for i in range(len(row["loss_curve"]))]
        axes[0].plot(flops, row["loss_curve"], style, lw=1, label=arm)
        axes[1].plot(row["entropy_by_layer"], style, marker=".", label=arm)
    axes[0].axhline(theory["loss"], color="0.6", lw=1, label="blind: entropy of the targets")
    most = axes[1].axhline(theory["entropy"], color="0.6", lw=1, label="log min(tokens, d), the most there is")
    axes[0].set(xlabel="training FLOPs", ylabel="training loss (nats, mean of 10 steps)")
    axes[1].set(xlabel="layer", ylabel="cosine entropy (nats)")
    done = [line for line in table if line[metric] is not None]
    lines = {}  # one for each arm and h, against gamma: a sweep has several points on each
    for line in sorted(done, key=lambda line: line["h"] or 0):
        lines.setdefault((line["arm"], line["h"]), []).append(line)
    if len(done) == len(lines):
        axes[2].errorbar(range(len(done)), [line[metric] for line in done], [line[metric + "_sd"] or 0 for line in done],
                         fmt="ko", mfc="none", capsize=3)
        axes[2].set_xticks(range(len(done)), [line["arm"] for line in done], rotation=60, fontsize=7)
    else:
        for (arm, h), part in lines.items():
            if h is None:
                axes[2].axhline(part[0][metric], color="0.6", ls={"sphere": "-", "prenorm": "--"}.get(arm, ":"), label=arm)
            else:
                axes[2].plot([line["gamma"] for line in part], [line[metric] for line in part],
                             "k-" if arm == "tangent" else "k--", marker="os^v"[sorted({k for _, k in lines if k}).index(h)],
                             mfc="none", label=f"{arm}, h = {h:.2g}")
        axes[2].set(xlabel="gamma", xscale="log")
        axes[2].legend(fontsize=5)
    axes[2].set(ylabel=f"{label} (mean{' and s.d.' if len(done) == len(lines) else ''} over seeds)")
    axes[0].legend(fontsize=7), axes[1].legend(handles=[most], fontsize=7)
    harness.save_figure(figure, out / f"{metric}.png")
