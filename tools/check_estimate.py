"""The estimate of tools/estimate.py beside every run under benchmarks/ whose speed was measured: how far off it is.

python tools/check_estimate.py --output benchmarks/estimate.json
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import launch  # noqa: E402  (before torch)

import benchmark  # noqa: E402
import estimate  # noqa: E402

LEVERS_ROW = re.compile(
    r"^([BLH])(\d+)-(\w+)-(\w+)-(on|off) +([\d.]+) ms, +(\d+) img/s, peak ([\d.]+) GiB", re.MULTILINE
)
SIZES = {"B": "base_patch16", "L": "large_patch16", "H": "huge_patch14"}
KIND_OVERRIDES = {
    "compiled": ["compile=true"],
    "te": ["compile=false", "model.act_layer=gelu_tanh", "model.transformer_engine=true"],
    "fp8": ["compile=false", "model.act_layer=gelu_tanh", "model.transformer_engine=true", "fp8_config.enabled=true"],
}
VARIANTS = {"ours, plain, compiled": "compiled", "ours, compiled": "compiled"}
VARIANTS |= {"ours, TE, BF16": "te", "ours, TE, FP8 delayed": "fp8"}


def measured_runs() -> list[dict[str, Any]]:
    """Every run under benchmarks/ with images/s and how to start it: a row for the comparison."""
    rows = []
    folder = ROOT / "benchmarks"
    for file in sorted(folder.glob("*.json")):
        if not re.match("train_|profile_|memory_", file.name):
            continue
        content = json.loads(file.read_text())
        meta, results = content["meta"], content["results"]
        config, overrides = benchmark.config_name_and_overrides(meta["command"].split(" -- ")[1].split())
        overrides = ["cuda_graphs=false", *overrides]  # as all configs had it then
        nproc = re.search(r"--nproc (\d+)", meta["command"]) or re.match(r"(\d+) x", meta["card"])
        assert nproc is not None
        by_script = {results["script"]: results["timed"]} if "timed" in results else results
        for script, got in by_script.items():
            row = {"file": file.name, "commit": meta["commit"], "script": script, "gpus": int(nproc[1])}
            row |= {"config": config, "overrides": overrides, "images_per_second": got["images_per_second"]}
            rows.append(row | {"peak_gib": got.get("memory_peak_gib")})

    def synthetic(name: str, batch: int, kind: str, graphs: str, gpus: int = 1) -> dict[str, Any]:
        overrides = [f"cuda_graphs={graphs}", f"model=vit_{name}_224", *KIND_OVERRIDES[kind]]
        overrides += [f"global_batch_size={batch}", "data=synthetic"]
        return {"config": "vit_base_patch16_224", "overrides": overrides, "gpus": gpus}

    for file in sorted(folder.glob("step_*.json")):
        content = json.loads(file.read_text())
        for got in content["results"]["rows"]:
            if (kind := VARIANTS.get(got["variant"])) is not None:
                row = {"file": file.name, "commit": content["meta"]["commit"], "script": "train_ddp"}
                row |= synthetic(got["model"], got["batch"], kind, "false")
                rows.append(row | {"images_per_second": got["images_per_second"], "peak_gib": got["peak_gib"]})
    for file in sorted([*folder.glob("strategies_*.json"), *folder.glob("scaling_*.json")]):
        content = json.loads(file.read_text())
        for part in content if isinstance(content, list) else [content]:
            found = part["results"] if isinstance(part["results"], list) else part["results"]["rows"]
            for got in found if "NCCL_MAX_CTAS=" not in part["meta"].get("note", "") else ():
                if "images_per_second" not in got or got.get("variant") not in VARIANTS:
                    continue
                row = {"file": file.name, "commit": part["meta"]["commit"], "script": got["script"]}
                batch = got["images_a_gpu"] * got["gpus"]
                row |= synthetic(got["model"], batch, VARIANTS[got["variant"]], "true", got["gpus"])
                rows.append(row | {"images_per_second": got["images_per_second"], "peak_gib": got["peak_gib"]})
    levers = (folder / estimate.LEVERS[0]).read_text()
    for size, batch, script, blocks, graphs, _, speed, peak in LEVERS_ROW.findall(levers):
        kind = "fp8" if blocks == "fp8d" else blocks
        row = synthetic(SIZES[size], int(batch), kind, {"on": "true", "off": "false"}[graphs])
        row |= {"file": estimate.LEVERS[0], "commit": estimate.LEVERS[1], "script": f"train_{script}"}
        rows.append(row | {"images_per_second": float(speed), "peak_gib": float(peak)})
    return rows


def compare(output: Path) -> None:
    """Write the estimate of each measured run beside it, with relative errors; print the worst and the middle one."""
    rows, rates = [], {(rate.speed, rate.file) for known in estimate.RATES.values() for rate in known.values()}
    network = estimate.ASSUMED["network GB/s a card"]
    for row in measured_runs():
        cfg = estimate.config_of(row["config"], row["overrides"], row["script"])
        got = estimate.estimate(cfg, row["script"], row["gpus"], estimate.Shape.of(cfg), network=network)
        speed = cfg.global_batch_size / got.step
        row |= {"estimated_images_per_second": round(speed, 1), "estimated_peak_gib": round(got.peak, 2)}
        row["error_of_speed"] = round(speed / row["images_per_second"] - 1, 3)
        row["error_of_peak"] = row["peak_gib"] and round(got.peak / row["peak_gib"] - 1, 3)
        row["is_a_rate"] = any(abs(row["images_per_second"] - s) < 1 and row["file"] == f for s, f in rates)
        rows.append(row)
    names = ("RATES", "MOVED_TBS", "UPDATE_BYTES", "PASS_BYTES", "BETWEEN_STEPS_MS", "HOST_MS", "SLOWER", "SHOWN")
    names += ("NVLINK_GBS", "ASSUMED", "KEPT", "KEPT_BY_CASTS", "KEPT_OUTSIDE")
    used = {name: getattr(estimate, name) for name in names}
    summary = {}
    for key in ("error_of_speed", "error_of_peak"):
        errors = sorted(abs(row[key]) for row in rows if row[key] is not None and not row["is_a_rate"])
        summary[key] = {"runs": len(errors), "median": errors[len(errors) // 2], "worst": errors[-1]}
    benchmark.write(output, {"used": used, "summary_without_rates": summary, "rows": rows})
    print(json.dumps(summary))


def main() -> None:
    """Parse, compare."""
    parser = launch.Parser(__doc__)
    parser.add_argument("--output", type=Path, required=True)
    compare(parser.parse_args().output)


if __name__ == "__main__":
    main()
