"""
Character language model, 24 layers: standard RoPE attention against consensus-safe attention at equal parameters, and
the sweep of the step size eta through its threshold.

    arms        standard, consensus, consensus-v, consensus-qkv        (model.py; equal parameter counts)
    eta_c       2/lambda_max, lambda_max = 1 - min_i A_ii              (causal mask: rope_consensus.py)
    D           max_ij arccos(x_i^T x_j), radians                      (metrics.angular_diameter)
    multiplier  growth of a disagreement per application of an attention update's derivative at consensus
                                                                       (disagreement_growth)

A point of the sweep has diverged, by this file's criterion, when
    its loss is not finite, or the last validation loss of its curve is above the first ("loss"), or
    disagreement at consensus grows: the multiplier of some layer is above 1 ("multiplier").
In the sweep the attention's eta is held at the given value (it is a learned parameter otherwise) and the MLP's starts at
its usual one, so that eta is all that differs between two points.

    symbol       here                 shape
    eta          --eta, --eta-start   one number; in the model one per channel, (d,)
    D per layer  diameter_by_layer    L + 1: before every layer and after the last

Source: the note "Consensus-Safe RoPE Residual Attention", section 4.

    $ python train_charlm.py                  # standard and consensus-qkv: about 5 minutes on two CPU cores
    $ python train_charlm.py --eta            # threshold and sweep of eta: within 8 minutes on two CPU cores
    $ python train_charlm.py --eta 0.5 1 2    # those values alone; --no-control: what the control prevents
    $ python train_charlm.py --quick          # half a minute, to see that all of it works
"""
import copy
import math
import sys

import torch

import harness
import metrics
import noise_arms
import noise_block
import rope_consensus
from data import character_data, load_text, tiles, windows
from harness import UserError
from model import ARMS, Transformer

# Recipe of each arm: peak learning rate, first eta of attention and MLP. README shows half and double the rates at seed 0:
# these are the best of three, but for the bare consensus arm, which has the rate of the others and does better at double it.
RECIPES = {
    "standard": dict(lr=1.5e-2, eta=None, eta_mlp=None),
    "consensus": dict(lr=4e-2, eta=0.02, eta_mlp=0.07),
    "consensus-v": dict(lr=4e-2, eta=0.07, eta_mlp=0.07),
    "consensus-qkv": dict(lr=4e-2, eta=0.07, eta_mlp=0.07),
}
SWEEP = (0.02, 0.05, 0.1, 0.3, 1.0, 1.8, 2.3, 3.0, 4.5)


def parse():
    parser = harness.Parser("24-layer character model: standard RoPE attention against consensus-safe attention.")
    harness.add_common(parser, layers=24, dim=64, heads=4, batch=8)
    at_least_0 = harness.number(float, low=0)
    parser.add_argument("--dataset", default="shakespeare", help="shakespeare, ptb, pydoc, or a UTF-8 text file "
                        "(default: %(default)s)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM",
                        help=f"among {', '.join(ARMS)} (default: standard consensus-qkv; with --eta standard consensus)")
    parser.add_argument("--seq", nargs="+", type=harness.number(int, low=1), metavar="SEQ",
                        help="sequence lengths, one after the other (default: 256; with --eta 128)")
    parser.add_argument("--eta", nargs="*", type=at_least_0, metavar="ETA", help="sweep the attention step size over "
                        f"these values, and measure the threshold (no value: {' '.join(map(str, SWEEP))}); "
                        "then --steps is 80 and --seq 128 by default, else they are 300 and 256")
    parser.add_argument("--eta-start", type=at_least_0, metavar="ETA",
                        help="first step size of attention and MLP, learned from there (default: the arm's own)")
    parser.add_argument("--beta", type=at_least_0, default=6.0, help="inverse temperature (default: %(default)s)")
    parser.add_argument("--control-every", type=harness.number(int, low=1), default=50, metavar="K",
                        help="steps between two controls of eta (default: %(default)s)")
    parser.add_argument("--no-control", action="store_true", help="leave eta as it is: what the control prevents")
    parser.add_argument("--loop", action="store_true", help="one block applied again and again (recurrent in depth)")
    parser.add_argument("--noise", choices=("none", "tangent"), default="none",
                        help="noise_block.py after every layer, on the tokens' directions (default: %(default)s)")
    parser.add_argument("--gamma", type=at_least_0, default=0.03, help="of the noise (default: %(default)s)")
    parser.add_argument("--h", type=at_least_0, default=0.01, help="depth step of the noise (default: %(default)s)")
    parser.add_argument("--sample", type=harness.number(int, low=0), default=200, metavar="N",
                        help="characters of generated text for each arm (default: %(default)s)")
    parser.add_argument("--prompt", default="\n", help="what the sample starts with (default: a line break)")
    parser.add_argument("--temperature", type=at_least_0, default=0.8, help="of the sample; 0 takes the likeliest "
                        "character (default: %(default)s)")
    if "--quick" in sys.argv:  # smaller defaults; what is given on the command line stays
        parser.set_defaults(layers=3, dim=32, heads=2, batch=4, steps=20, seq=[32], sample=60, control_every=10)
    args = parser.parse_args()
    sweep = args.eta is not None
    args.arms = args.arms or (["standard", "consensus"] if sweep else ["standard", "consensus-qkv"])
    if sweep and ("standard" not in args.arms or len(set(args.arms)) != 2):
        raise UserError("--eta compares one controlled arm with standard: give --arms standard and one other")
    args.eta = (args.eta or ((0.3, 3.0) if args.quick else SWEEP)) if sweep else None
    args.seq = args.seq or [128 if sweep else 256]
    args.steps = args.steps or (80 if sweep else 300)
    args.eval_every = args.eval_every or max(1, args.steps // 3)
    if len(set(args.seq)) < len(args.seq):
        raise UserError(f"--seq {' '.join(map(str, args.seq))}: name each once; --seeds repeats them")
    if sweep and (args.seeds > 1 or len(args.seq) > 1):
        raise UserError("--eta sweeps one --seed and one --seq: run it once for each, with an --out of its own")
    harness.check_common(args)
    return args


# ------------------------------------------------------------------------------------------------ measurements

def disagreement_growth(update, x, heads, steps=200):
    """Growth per application of update's derivative J at equal tokens x (n, d): that of a random disagreement's diameter, the
    largest of any head's, mean over the second half of `steps` applications.

    Not rope_consensus.local_multiplier: a causal mask makes J so far from normal that Arnoldi's iteration does not converge
    at these lengths, and that a disagreement outgrows J's eigenvalues for hundreds of steps. But the diameter of a bare head
    with eta <= 1 never grows, since each token becomes a mean of the tokens. With 1 < eta < eta_c it may still do so for
    hundreds of steps: close below eta_c the multiplier can be above 1.
    """
    v, logs = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype), []
    for _ in range(steps + 1):
        v = v - v.mean(-2, keepdim=True)
        by_head = v.unflatten(-1, (heads, -1)).transpose(-2, -3)
        diameter = torch.cdist(by_head, by_head, compute_mode="donot_use_mm_for_euclid_dist").max()
        logs.append(diameter.log())
        v = torch.func.jvp(update, (x,), (v / diameter,))[1]
    return torch.stack(logs[-(steps // 2):]).mean().exp().item()


def at_consensus(model, ids):
    """lambda_max and the multiplier at consensus, in the first, the middle and the last layer: where eta_c is exact.

    The consensus is the layer's own mean token (unit per head), so that the layer sees what it is used to; float64.
    lambda_max there is not the one the control sees, which is taken at the tokens as they are.
    """
    states, found = model.states(model.embed(ids[:1])), []
    for layer in sorted({0, model.layers // 2, model.layers - 1}):
        attn = copy.deepcopy(model.stack()[layer].attn).cpu().double().eval().requires_grad_(False)
        rows = states[layer][0].cpu().double().unflatten(-1, (attn.heads, -1))
        x = rope_consensus.unit(rows.mean(0, keepdim=True)).flatten(-2).repeat(ids.shape[1], 1)  # (T, d), equal rows
        attn.control(x, act=False)
        found.append({"layer": layer, "lambda_max": attn.lam.max().item(),
                      "multiplier": disagreement_growth(lambda z: attn(z, eager=True), x, attn.heads)})
    return found


def measure(model, ids, targets):
    """metrics.by_layer over whole token states, robustness, and in the controlled arms lambda_max and eta."""
    model.eval()
    found = metrics.by_layer(model.states(model.embed(ids))) | noise_arms.embedding_robustness(model, ids, targets)
    found["diameter_last"] = found["diameter_by_layer"][-1]
    if model.arm != "standard":
        lam, _, used = model.control(ids, act=False).tolist()
        found |= {"lambda_max_by_layer": lam, "eta_used_by_layer": used, "lambda_max": max(lam), "eta_used": max(used),
                  "eta_used_least": min(used)}
    return found


def encode(prompt, vocabulary):
    """Ids of the prompt; an empty one becomes the vocabulary's first character. UserError at an unknown character."""
    for position, character in enumerate(prompt):
        if character not in vocabulary:
            raise UserError(f"--prompt: character {character!r} at position {position} does not occur in the text, so the "
                            "model has no id for it; leave it out")
    return [vocabulary.index(character) for character in prompt or vocabulary[0]]


@torch.no_grad()
def sample(model, vocabulary, prompt, length, seq, temperature, seed, device):
    """`length` characters after the prompt; the model sees the last `seq` of them."""
    model.eval()
    rng = harness.generator(seed, "sample")
    ids = torch.tensor([encode(prompt, vocabulary)], device=device)
    for _ in range(length):
        logits = model(ids[:, -seq:])[0][0, -1].float().cpu()  # float64 is not on every device
        if not logits.isfinite().all():
            raise UserError("the model's logits are not finite: it has diverged, so there is nothing to sample from")
        if temperature == 0:
            pick = logits.argmax().view(1)
        else:
            logits = (logits - logits.max()).double() / temperature  # 0 and below: small temperatures overflow to -inf
            pick = torch.multinomial(logits.softmax(-1), 1, generator=rng)
        ids = torch.cat((ids, pick[None].to(device)), 1)
    return "".join(vocabulary[i] for i in ids[0].tolist())


# ---------------------------------------------------------------------------------------------------- one run

def run(args, data, out, progress, device, dtype, arm, seq, seed, eta=None):
    """Train one model and measure it. eta: held at this value in the attention. Returns (model, row of the table)."""
    recipe = RECIPES[arm]
    start = dict(eta=recipe["eta"], eta_mlp=recipe["eta_mlp"])
    if args.eta_start is not None and arm != "standard":
        start = dict(eta=args.eta_start, eta_mlp=args.eta_start)
    if eta is not None:
        start["eta"] = eta
    torch.manual_seed(seed)
    model = Transformer(len(data.vocabulary), args.layers, args.dim, args.heads, arm, beta=args.beta, loop=args.loop,
                        **start)
    if args.noise == "tangent":
        model.noise = noise_block.attach(model.blocks, args.dim, args.h, args.gamma, seed=1000 * seed)
        for block in model.blocks:  # the noise moves whole tokens: each head's part goes back to its own sphere
            block.register_forward_hook(lambda block, _, x: model.on_spheres(x))
    if eta is not None:
        for block in model.blocks:
            block.attn.eta.requires_grad_(False)
    name = f"{arm}-seq{seq}-seed{seed}" + ("" if eta is None else f"-eta{eta:g}")

    def batch(step):
        starts = torch.randint(len(data.train) - seq, (args.batch,), generator=harness.generator(seed, "data", step))
        return windows(data.train, starts, seq, device)

    def control(step, inputs):
        if arm != "standard" and step % args.control_every == 0:
            seen = model.control(inputs, act=not args.no_control).amax(-1).tolist()  # one synchronisation
            return dict(zip(("lambda_max", "eta_asked", "eta_used"), seen))

    lr = harness.peak_lr(args, arm, recipe["lr"])
    result = harness.train(
        out / name, model, batch, seed=seed, steps=args.steps, lr=lr,
        header=dict(arm=arm, seq=seq, batch=args.batch, layers=args.layers, dim=args.dim, heads=args.heads, **start,
                    held=eta is not None, beta=args.beta, loop=args.loop, noise=args.noise, gamma=args.gamma, h=args.h,
                    control=not args.no_control, control_every=args.control_every, dataset=data.name,
                    vocabulary=data.vocabulary, data=data.sha256),
        device=device, dtype=dtype, eval_every=args.eval_every,
        evaluate=lambda m: {"val_loss": metrics.mean_loss(m, tiles(data.valid, seq, device, blocks=32))},
        every=control, compile=args.compile, progress=progress, label=name)
    if harness.RANK:
        return model, None
    norms = [g for g in result["grad_norms"] if g is not None]
    stats = metrics.grad_norm_stats(norms) if norms else {"mean": None, "var": None}  # diverged before the first step
    row = dict(arm=arm, seq=seq, seed=seed, lr=lr, eta=eta, diverged=result["diverged"], diverged_at=result["diverged_at"],
               curve=[e["val_loss"] for e in result["evaluations"]], val_loss=None, best=result["best"],
               train_loss=result["train_loss_last"], grad_norm_mean=stats["mean"], grad_norm_var=stats["var"])
    if not result["diverged"]:
        row["val_loss"] = metrics.mean_loss(model.eval(), tiles(data.valid, seq, device))
        row["bits_per_byte"] = metrics.bits_per_byte(row["val_loss"], len(data.valid), data.valid_bytes)
        ids, targets = windows(data.valid, torch.arange(4) * ((len(data.valid) - seq) // 4), seq, device)
        row.update(measure(model, ids, targets))
        if eta is not None:
            row["consensus"] = at_consensus(model, ids)
            row["multiplier"] = max(layer["multiplier"] for layer in row["consensus"])
            largest = max(layer["lambda_max"] for layer in row["consensus"])
            row["eta_c"] = 2 / largest if largest else math.inf  # one token, or A = I
            row["eta_over_eta_c"] = eta / row["eta_c"]
    return model, row


# ------------------------------------------------------------------------------------------------- two commands

def compare(args, data, out, device, dtype):
    """Every arm, sequence length and seed on the same batches: rows, table, verdicts, figure, samples."""
    points = [(seq, seed, arm) for seq in args.seq for seed in range(args.seed, args.seed + args.seeds) for arm in args.arms]
    progress = harness.Progress(args.steps * len(points))
    rows, samples = [], []
    for seq, seed, arm in points:
        model, row = run(args, data, out, progress, device, dtype, arm, seq, seed)
        rows.append(row)
        if row and args.sample and seed == args.seed and not row["diverged"]:
            text = sample(model, data.vocabulary, args.prompt, args.sample, seq, args.temperature, seed, device)
            samples.append({"arm": arm, "seq": seq, "text": text})
    progress.close()
    if harness.RANK:
        return None
    means, verdicts = [], []
    for seq in args.seq:
        for arm in args.arms:
            group = [r for r in rows if r["arm"] == arm and r["seq"] == seq]
            mean = {"arm": arm, "seq": seq, "seeds": sum(not r["diverged"] for r in group),
                    "val_losses": [r["val_loss"] for r in group]}
            for key in ("val_loss", "grad_norm_mean", "diameter_last"):
                mean[key], mean[key + "_sd"] = metrics.spread(group, key)
            means.append(mean)
        loss = {arm: [r["val_loss"] for r in rows if r["arm"] == arm and r["seq"] == seq] for arm in args.arms}
        for arm in args.arms[1:]:
            verdicts.append(metrics.paired_verdict(f"{arm} ends below {args.arms[0]}, seq {seq}, nats per character",
                                                   loss[arm], loss[args.arms[0]]))
    shown = [dict(row) for row in rows]  # the speed differs between equal runs: it stays in timing.json
    for row in shown:
        timing = out / f"{row['arm']}-seq{row['seq']}-seed{row['seed']}" / "timing.json"
        if timing.exists():
            row["chars_per_second"] = args.batch * row["seq"] / harness.read_json(timing)["seconds_per_step"]
    print(harness.table(shown, {
        "arm": ("arm", ""), "seq": ("seq", "d"), "seed": ("seed", "d"), "val_loss": ("val loss", ".4f"),
        "bits_per_byte": ("bits/byte", ".4f"), "diameter_last": ("D last", ".3f"),
        "grad_norm_mean": ("|grad|", ".3f"), "grad_norm_var": ("var", ".3g"), "lambda_max": ("lambda_max", ".4f"),
        "eta_used": ("eta used", ".3f"), "chars_per_second": ("chars/s", ".0f")}))
    for item in samples:
        print(f"\n--- {item['arm']}, seq {item['seq']}:\n{item['text']}")
    figure, (left, right) = harness.figure_axes(2)
    for arm, style in zip(args.arms, ("k-", "k--", "k:", "k-.")):
        first = next(r for r in rows if r["arm"] == arm)
        curve = harness.read_json(out / f"{arm}-seq{first['seq']}-seed{first['seed']}" / "result.json")["evaluations"]
        left.plot([e["step"] for e in curve], [e["val_loss"] for e in curve], style, marker="o", mfc="none", label=arm)
        if not first["diverged"]:
            right.plot(first["diameter_by_layer"], style, label=arm)
    left.set(xlabel="training step", ylabel="validation loss (nats per character)")
    left.axhline(blind := metrics.unigram_entropy(data.valid).item(), color="0.6", lw=1, label="unigram entropy: no context")
    right.axhline(math.pi, color="0.6", lw=1, label="pi, the most there is")
    right.set(xlabel="layer", ylabel="angular diameter D (radians)", ylim=(0, 3.4))
    left.legend(), right.legend()
    harness.save_figure(figure, out / "compare.png")
    return {"unigram_entropy": blind, "runs": rows, "means": means, "samples": samples, "verdicts": verdicts}


def boundary(rows, criterion, layers):
    """Does divergence begin within 20% of eta_c, by one criterion? The boundary lies between the largest stable and the
    smallest divergent eta/eta_c. holds: both lie in 0.8 to 1.2; does not hold: the boundary lies outside, above the
    largest eta where nothing divergent lies up to 1.2; otherwise, as where stable and divergent points alternate, not decided.
    Runs without a state left to take eta_c at lie beyond any boundary by loss, and nowhere by multiplier."""
    rows = [row for row in rows if criterion == "loss" or "multiplier" in row]
    ratio = lambda row: row.get("eta_over_eta_c", math.inf)
    stable = max((ratio(row) for row in rows if criterion not in row["diverged_by"]), default=0.0)
    divergent = min((ratio(row) for row in rows if criterion in row["diverged_by"]), default=math.inf)
    if 0.8 <= stable < divergent <= 1.2:
        verdict = "holds"
    elif stable < divergent and (divergent < 0.8 or stable > 1.2):
        verdict = "does not hold"
    else:
        verdict = "not decided"
    where = f"{stable:.2f} stable, " + (f"{divergent:.2f} divergent" if divergent < math.inf else "nothing divergent")
    return {"claim": f"{layers} layers, no control: divergence by {criterion} begins within 20% of eta_c",
            "measured": f"eta/eta_c {where}", "verdict": verdict}


def sweep(args, data, out, device, dtype):
    """(a) the toy block's threshold; (b) the sweep of eta beside the standard arm: table, figure, verdicts."""
    print("(a) the toy block, no mask, d = 16: step size at which disagreement starts to grow")
    toy = []
    for beta, n in ((1, 64), (8, 64)) if args.quick else ((0.5, 64), (1, 64), (2, 64), (4, 64), (8, 64), (1, 256)):
        eta_c, observed = rope_consensus.measure_threshold(beta, n, steps=100 if n == 256 else 200)
        toy.append(dict(beta=beta, n=n, eta_c=eta_c, eta_observed=observed, rel_error=observed / eta_c - 1))
    print(harness.table(toy, {"beta": ("beta", "g"), "n": ("n", "d"), "eta_c": ("eta_c", ".4f"),
                              "eta_observed": ("measured", ".4f"), "rel_error": ("difference", ".2%")}))
    contraction = []
    for beta in (0.25, 0.5, 1, 2, 4):
        diameter = rope_consensus.contraction(beta)
        factor = (diameter[:, 1:] / diameter[:, :-1])[diameter[:, 1:] > 1e-12].max().item()
        tau = metrics.dobrushin(rope_consensus.attention_matrix(rope_consensus.two_clusters(64, 16, 32), beta)).item()
        contraction.append(dict(beta=beta, worst_factor=factor, bound=metrics.mixing_envelope(beta, 1), gap=1 - tau))

    seq, arm = args.seq[0], next(a for a in args.arms if a != "standard")
    print(f"\n(b) {arm}, {args.layers} layers, seq {seq}, {args.steps} steps a point, control "
          f"{'off' if args.no_control else f'every {args.control_every} steps'}")
    progress = harness.Progress(args.steps * (1 + len(args.eta)))
    _, standard = run(args, data, out, progress, device, dtype, "standard", seq, args.seed)
    rows = [run(args, data, out, progress, device, dtype, arm, seq, args.seed, eta)[1] for eta in args.eta]
    progress.close()
    if harness.RANK:
        return None
    for row in rows:
        # on the same part of the validation text, which all of it is not; 1 itself is a mode that stands still, up to rounding
        by = [name for name, hit in (("loss", row["diverged"] or not row["curve"][-1] <= row["curve"][0]),
                                     ("multiplier", row.get("multiplier", 0) > 1 + 1e-9)) if hit]
        row["diverged"], row["diverged_by"] = bool(by), " ".join(by)
        row["control_acted"] = row.get("eta_used_least", row["eta"]) < row["eta"] * (1 - 1e-6)
    print(harness.table([standard, *rows], {
        "arm": ("arm", ""), "eta": ("eta", "g"), "eta_over_eta_c": ("eta/eta_c", ".3f"),
        "eta_used_least": ("used, least", ".3f"), "eta_used": ("most", ".3f"), "lambda_max": ("lambda_max", ".4f"),
        "multiplier": ("multiplier", ".3f"), "val_loss": ("val loss", ".4f"), "diameter_last": ("D last", ".3f"),
        "grad_norm_mean": ("|grad|", ".3f"), "diverged_by": ("diverged by", "")}))

    worst = max(abs(t["rel_error"]) for t in toy)
    verdicts = [
        {"claim": "the toy block's threshold is within 20% of eta_c (aim: 1%)",
         "measured": f"worst difference {worst:.2%}", "verdict": "holds" if worst < 0.2 else "does not hold"},
        {"claim": "averaging never decays slower than (1 - exp(-2 beta))^t",
         "measured": f"worst factor over bound {max(c['worst_factor'] / c['bound'] for c in contraction):.4f}",
         "verdict": "holds" if all(c["worst_factor"] <= c["bound"] for c in contraction) else "does not hold"},
    ]
    # slope of log(1 - tau) against beta between the two largest beta: -2 when contraction weakens as exp(-2 beta)
    slope = math.log(contraction[-1]["gap"] / contraction[-2]["gap"]) / (contraction[-1]["beta"] - contraction[-2]["beta"])
    verdicts.append({"claim": "contraction weakens exponentially in beta, as exp(-2 beta)",
                     "measured": f"two opposite clusters, beta {contraction[-2]['beta']} to {contraction[-1]['beta']}: "
                                 f"d log(1 - tau) / d beta = {slope:.3f}",
                     "verdict": "holds" if abs(slope + 2) < 0.1 else "does not hold"})
    if args.no_control:
        verdicts += [boundary(rows, "multiplier", args.layers), boundary(rows, "loss", args.layers)]
    else:
        grown = [row["eta"] for row in rows if row["diverged"]]
        looked = [layer for row in rows for layer in row.get("consensus", ())]
        layers, high = (sorted({layer["layer"] for layer in looked if layer["multiplier"] > least})
                        for least in (0, 1 + 1e-9))
        verdicts.append({"claim": f"{args.layers} layers: with the control no point diverges",
                         "measured": f"diverged at eta = {grown}; multiplier above 1 in layers {high} of {layers}"
                         if grown else "none did", "verdict": "does not hold" if grown else "holds"})
    figure, axes = harness.figure_axes(3)
    ratio = [row.get("eta_over_eta_c") for row in rows]
    for axis, key, label in zip(axes, ("val_loss", "diameter_last", "multiplier"),
                                ("validation loss (nats per character)", "D after the last layer (radians)",
                                 "multiplier at consensus")):
        axis.plot(ratio, [row.get(key) for row in rows], "ko-", mfc="none", label=arm)
        axis.axvline(1, color="0.6", ls=":", label="eta_c")
        axis.set(xlabel="eta / eta_c", ylabel=label)
        if standard.get(key) is not None:
            axis.axhline(standard[key], color="k", ls="--", lw=1, label="standard")
    axes[0].axhline(blind := metrics.unigram_entropy(data.valid).item(), color="0.6", label="unigram entropy: no context")
    axes[2].axhline(1, color="0.6", lw=1)
    theory = [0.02 * k for k in range(int(50 * max((r for r in ratio if r), default=1)) + 2)]
    axes[2].plot(theory, [abs(1 - 2 * t) for t in theory], color="0.6", label="fastest mode: |1 - eta lambda_max|")
    for axis in axes:
        axis.legend(fontsize=7)
    harness.save_figure(figure, out / "sweep.png")
    return {"toy": toy, "contraction": contraction, "unigram_entropy": blind, "standard": standard, "sweep": rows,
            "verdicts": verdicts}


def main():
    args = parse()
    device, dtype, line = harness.pick_device(args.device, args.dtype, args.threads, args.batch)
    print(line)
    with harness.rank_0_first():
        text = load_text(args.dataset, args.data_dir)
    data = character_data(text, max(args.seq))
    if args.sample and args.eta is None:
        if args.prompt == "\n" and "\n" not in data.vocabulary:
            args.prompt = ""
        encode(args.prompt, data.vocabulary)
    if args.lr is None and (args.layers, args.dim) != (24, 64) and not args.quick:
        print("note: the default learning rates are tuned for 24 layers and d = 64; set --lr for other sizes")
    params = {arm: sum(p.numel() for p in Transformer(len(data.vocabulary), args.layers, args.dim, args.heads, arm,
                                                      loop=args.loop).parameters()) for arm in ARMS}
    print(f"data: {text.name}, {len(text.text)} characters, {len(data.vocabulary)} different"
          f"{'; it holds ' + text.notes if text.notes else ''}; parameters {params[args.arms[0]]:,} in every arm")
    out, lock = harness.open_folder(args.out, args.resume, "charlm" if args.eta is None else "charlm-eta")
    with lock:
        config = harness.write_config(out, args, device, dataset=text.name, params=params)
        found = (compare if args.eta is None else sweep)(args, data, out, device, dtype)
        if harness.RANK:
            return
        harness.write_json(out / "summary.json", {**config, **found})
    print()
    harness.print_verdicts(found["verdicts"], out)


if __name__ == "__main__":
    harness.run_main(main)
