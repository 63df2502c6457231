"""Runs the seven tests of this folder on one model and prints one table, claim by claim, of every result there is.

Each test runs as its own process and writes its own JSON; the table is read back from those files, for all models found
in --out, and goes to summary.json (with --quick, from quick results to summary-quick.json) and, in a full run into the
default folder, between the markers in README.md. No number is typed. A test that fails is named and the others go on;
exit code 1 then.

    python geometry/all.py                          # all seven on micro: about 12 minutes on two CPU cores
    python geometry/all.py --model smollm2          # the five that need a model
    python geometry/all.py --only identities rope_recurrence
    python geometry/all.py --collect                # no runs: the table of what is there
"""
import json
import subprocess
import sys
from pathlib import Path

import models

HERE = Path(__file__).resolve().parent
NO_MODEL = ("rope_recurrence", "identities")
TESTS = ("mollifier", "torsion", "symmetric_ablation", "rope_recurrence", "context_horizon", "ness_vortex",
         "identities")
MARK = ("<!-- table: written by all.py -->", "<!-- end of table -->")


def run_tests(args, tests):
    """Runs each script with the flags that all of them share; returns the names of those that failed."""
    failed = []
    for test in tests:
        command = [sys.executable, str(HERE / f"{test}.py"), "--out", str(args.out), "--seed", str(args.seed)]
        command += ["--quick"] * args.quick + ["--debug"] * args.debug
        for flag in () if test in NO_MODEL else ("model", "dtype", "data_dir"):
            if getattr(args, flag) is not None:
                command += [f"--{flag.replace('_', '-')}", str(getattr(args, flag))]
        if args.threads is not None:
            command += ["--threads", str(args.threads)]
        print(f"\n=== {test}", flush=True)
        if subprocess.run(command).returncode:
            failed.append(test)
    return failed


def collect(folder, quick):
    """{test: {model: result}} from the JSON files in folder; only quick results, or only full ones."""
    found = {}
    for test in TESTS:
        for path in sorted(folder.glob(f"{test}-*.json")):
            try:
                result = json.loads(path.read_text(encoding="utf-8"))
                if result["quick"] == quick:
                    found.setdefault(test, {})[result["model"]] = result
            except (ValueError, KeyError, TypeError):
                raise models.UserError(f"{path} is not a result of these scripts: delete it or run {test}.py "
                                       f"again") from None
    return found


def summarise(found):
    """One row a claim: test, claim, and what each model's result says of it."""
    rows = []
    for test, by_model in found.items():
        order = sorted(by_model, key=lambda m: (m != "analytic", m != "micro", m))
        for claim in dict.fromkeys(c["claim"] for m in order for c in by_model[m]["claims"]):
            rows.append(dict(test=test, claim=claim, models={
                m: {k: c[k] for k in ("paper", "theory", "ours", "null", "verdict", "rule", "would_change")}
                for m in order for c in by_model[m]["claims"] if c["claim"] == claim}))
    return rows


def verdicts(row):
    """'holds', or 'micro: holds; smollm2: does not hold' where models differ."""
    each = {m: c["verdict"] for m, c in row["models"].items()}
    names = "" if list(each) == ["analytic"] else f" ({', '.join(each)})"
    return next(iter(each.values())) + names if len(set(each.values())) == 1 else "; ".join(f"{m}: {v}" for m,
                                                                                            v in each.items())


def markdown(rows):
    """The table and, below it, what would change each verdict."""
    cell = lambda v: str(v).replace("|", "\\|").replace("\n", " ")  # noqa: E731
    lines = ["| test | claim | paper | ours | null control | verdict |", "| --- | --- | --- | --- | --- | --- |"]
    for r in rows:
        name, first = next(iter(r["models"].items()))
        ours = first["ours"] if name == "analytic" else f"{name}: {first['ours']}"
        lines.append("| " + " | ".join(cell(v) for v in (
            r["test"], r["claim"], first["paper"], ours, first["null"], f"**{verdicts(r)}**")) + " |")
    lines += ["", "What would change a verdict:", ""]
    lines += [f"- {r['test']}, {r['claim']}: {next(iter(r['models'].values()))['would_change']}." for r in rows]
    return "\n".join(lines)


def fill(path, text):
    """Puts text between the markers of a Markdown file."""
    page = path.read_text(encoding="utf-8")
    if page.count(MARK[0]) != 1 or page.count(MARK[1]) != 1:
        raise models.UserError(f"{path} needs the lines {MARK[0]!r} and {MARK[1]!r}, once each")
    head, rest = page.split(MARK[0])
    models.write_atomic(path, f"{head}{MARK[0]}\n{text}\n{MARK[1]}{rest.split(MARK[1])[1]}".encode())


def main():
    p = models.parser(__doc__, dtype=None)
    default_out = p.get_default("out")
    p.add_argument("--only", nargs="+", choices=TESTS, metavar="TEST", help=f"some of {', '.join(TESTS)}")
    p.add_argument("--collect", action="store_true", help="run nothing, read the results that are there")
    args = p.parse_args()
    tests = args.only or [t for t in TESTS if args.model == "micro" or t not in NO_MODEL]
    failed = [] if args.collect else run_tests(args, tests)
    found = collect(args.out, args.quick)
    if not found:
        raise models.UserError(f"no results in {args.out}: run without --collect first")
    rows = summarise(found)
    models.table("All claims", ("test", "claim", "verdict"), [(r["test"], r["claim"], verdicts(r)) for r in rows])
    path = args.out / f"summary{'-quick' * args.quick}.json"
    models.write_json(path, dict(
        claims=rows, sources={t: {m: dict(seed=r["seed"], torch=r["torch"]) for m, r in v.items()} for t,
                              v in found.items()}))
    print(f"\nwrote {path}")
    if args.out == default_out and not args.quick:
        fill(HERE / "README.md", markdown(rows))
        print(f"wrote the table in {HERE / 'README.md'}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    models.run_main(main)
