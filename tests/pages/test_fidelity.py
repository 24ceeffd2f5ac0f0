"""Scores of predictions against measured runs, and how rows of measured sets are stated."""

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fidelity.predict import Outcome, Predictor
from benchmarks.fidelity.reasons import far_off
from benchmarks.fidelity.report import write_report
from benchmarks.fidelity.runs import Model, Run
from benchmarks.fidelity.score import regrets, score
from benchmarks.fidelity.sets import read_runs, set_of
from benchmarks.fit_clusters import fit, weight_of
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Calibration, Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.simulation.simulation import simulate_plan

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1)
SMALL = Model.of("gpt", num_layers=2, hidden=64, num_heads=4, sequence=32, vocabulary=256, batch=8)


def outcome(predicted, measured, *, group="a", peak=None, measured_peak=None, fits=True, ran=True):
    run = Run(1, "", (group, 8), SMALL, CLUSTER, (), measured, measured_peak, ran)
    return Outcome(run, TrainingSetup(), predicted, 0.1, peak or 0, fits)


def test_errors_are_shares_of_what_was_measured():
    found = score([outcome(1.1, 1.0), outcome(0.8, 1.0), outcome(3.0, 2.0)])
    assert found["mape"] == pytest.approx(100 * (0.1 + 0.2 + 0.5) / 3, abs=0.01)
    assert found["median"] == pytest.approx(20.0)
    assert found["bias"] == pytest.approx(100 * (0.1 - 0.2 + 0.5) / 3, abs=0.01)
    assert found["p90"] == pytest.approx(44.0)


def test_regret_is_what_the_predicted_best_costs_over_the_measured_best():
    outcomes = [outcome(1.0, 3.0), outcome(2.0, 2.0), outcome(9.0, 9.0, group="alone")]
    assert regrets(outcomes) == {("a", 8): pytest.approx(0.5)}
    assert score(outcomes)["regret_mean"] == pytest.approx(50.0)


def test_false_alarms_count_runs_that_ran_and_recall_those_that_did_not():
    found = score(
        [
            outcome(1, 1, fits=False),
            outcome(1, 1),
            outcome(1, 1),
            outcome(1, 1),
            outcome(1, None, ran=False, fits=False),
            outcome(1, None, ran=False),
            outcome(1, None, ran=None, fits=False),
        ]
    )
    assert (found["fit_false_alarm"], found["fit_recall"], found["scored"]) == (25.0, 50.0, 4)


def test_a_plan_that_fills_the_memory_is_chosen_only_where_none_leaves_any_free():
    tight = [replace(outcome(1.0, 3.0), free=0.05), replace(outcome(1.1, 4.0), free=0.02)]
    roomy = [replace(outcome(2.0, 1.2), free=0.2), outcome(3.0, 1.0)]
    assert regrets([*tight, *roomy]) == {("a", 8): pytest.approx(0.2)}
    assert regrets(tight) == {("a", 8): pytest.approx(0.0)}
    full = replace(outcome(0.5, 9.0, fits=False), free=-0.1)
    assert regrets([full, *tight]) == {("a", 8): pytest.approx(0.0)}


def test_a_slow_run_in_nearly_full_memory_is_told_so():
    tight, roomy = replace(outcome(1.0, 3.0), free=0.05), outcome(1.0, 3.0)
    whys = dict.fromkeys(reason for _, reason in far_off([tight, roomy]))
    assert any("memory nearly full" in why for why in whys)
    assert len(whys) == 2


def test_memory_is_scored_where_it_was_measured():
    found = score([outcome(1, 1, peak=30, measured_peak=40), outcome(1, 1)])
    assert found["memory_mape"] == pytest.approx(25.0)


def test_a_set_without_failures_has_no_recall():
    found = score([outcome(1.0, 1.0)])
    assert found["fit_recall"] is None
    assert found["spearman"] is None
    assert found["regret_mean"] is None


def test_of_tuned_setups_the_fastest_that_fits_counts():
    graph = gpt(**dict(SMALL.sizes))
    setups = tuple(TrainingSetup(microbatch=m, tensor=4) for m in (1, 2, 4))
    run = Run(1, "", ("a", 8), SMALL, CLUSTER, setups, 1.0)
    predictor = Predictor()
    alone = [predictor.outcome(Run(1, "", ("a", 8), SMALL, CLUSTER, (s,), 1.0)) for s in setups]
    assert predictor.outcome(run).seconds == min(each.seconds for each in alone)
    assert graph.batch == 8


def test_a_run_without_a_possible_plan_says_why():
    run = Run(1, "", ("a", 8), SMALL, CLUSTER, (TrainingSetup(tensor=3),), 1.0)
    with pytest.raises(ValueError, match="do not divide the 8"):
        Predictor().outcome(run)


def test_an_outlier_among_neighbours_is_called_one():
    def at(microbatch, measured):
        setup = TrainingSetup(microbatch=microbatch)
        run = Run(1, "", ("a", 8), SMALL, CLUSTER, (setup,), measured)
        return Outcome(run, setup, 1.0, 0.1, 0, True)

    (listed,) = far_off([at(1, 1.0), at(2, 2.0), at(4, 1.0)])
    assert listed[0].setup.microbatch == 2
    assert "outlier" in listed[1]


NANOTRON = (
    "model,layers,hidden,heads,ffn,vocab,seq,gpu,nodes,gpus,gbs,mbs,grad_acc,dp,pp,tp,zero,status,"
    "tok_s_gpu,mfu_pct,peak_mem_GB,iter_ms,attn_inferred,embed_inferred,clean,mfu_recomputed,split"
)
ROWS = (
    "1B,2,64,4,128,256,32,H100-80GB-SXM,1,8,16,2,4,2,2,2,0,ok,1,1,2.5,100,mha,tied,1,0.1,x",
    "1B,2,64,4,128,256,32,H100-80GB-SXM,1,8,16,2,4,2,2,2,1,crashed_or_oom,,,,,,,0,,x",
    "1B,2,64,4,128,256,32,H100-80GB-SXM,1,8,16,,4,2,2,2,1,ok,1,1,2.5,100,mha,tied,1,0.1,x",
    "1B,2,64,4,128,256,32,H100-80GB-SXM,1,8,16,2,4,2,2,3,1,ok,1,1,2.5,100,mha,tied,1,0.1,x",
)


@pytest.fixture
def measured(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([NANOTRON, *ROWS]) + "\n", encoding="utf-8")
    return path


def test_rows_become_runs_and_what_is_not_told_is_left_out(measured):
    kind = set_of(measured)
    assert kind is not None
    assert kind.name == "nanotron"
    reading = read_runs(measured, kind)
    assert dict(reading.left_out) == {"mbs is not given": 1}
    first, failed, _ = reading.runs
    assert (first.seconds, first.peak_bytes, first.ran) == (0.1, 2.5 * 2**30, True)
    assert first.peak_rank == 0
    assert (first.setups[0].tensor, first.setups[0].pipeline, first.setups[0].zero) == (2, 2, 0)
    assert (failed.seconds, failed.ran) == (None, False)
    assert first.model.graph().batch == 16


def test_a_peak_is_that_of_the_rank_on_which_it_was_measured(measured):
    kind = set_of(measured)
    assert kind is not None
    first = read_runs(measured, kind).runs[0]
    reserved = round(first.cluster.calibration.reserved_gib * 2**30)
    plan = first.setups[0].plan(first.model.graph(), first.cluster)
    simulated = simulate_plan(plan, first.model.graph(), default_costs())
    peaks = [rank.peak for rank in simulated.memory]
    assert peaks[0] != peaks[1]
    for rank, expected in ((0, peaks[0]), (1, peaks[1]), (None, max(peaks))):
        run = replace(first, peak_rank=rank)
        assert Predictor().outcome(run).peak_bytes == expected + reserved


@pytest.mark.slow
def test_the_benchmark_prints_a_line_a_file_and_writes_the_page(measured, tmp_path):
    page = tmp_path / "accuracy.md"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fidelity", "--data", tmp_path, "--report", page],
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [json.loads(text) for text in done.stdout.splitlines()]
    assert (line["file"], line["rows"], line["scored"]) == ("runs.csv", 4, 1)
    assert sum(line["left_out"].values()) == 2
    assert line["mape"] > 0
    text = page.read_text(encoding="utf-8")
    assert "runs.csv" in text
    assert (tmp_path / "accuracy" / "steps.png").stat().st_size > 5000


def test_a_file_of_another_kind_is_not_read(tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n", encoding="utf-8")
    assert set_of(other) is None


@pytest.mark.skipif("STRATAGEM_DATA" not in os.environ, reason="needs STRATAGEM_DATA")
def test_every_measured_set_is_recognised_and_stated():
    folder = Path(os.environ["STRATAGEM_DATA"]) / "measured"
    for path in sorted(folder.glob("*.csv")):
        kind = set_of(path)
        assert kind is not None, path
        with path.open(newline="") as file:
            rows = sum(1 for _ in csv.DictReader(file))
        reading = read_runs(path, kind)
        assert len(reading.runs) + sum(reading.left_out.values()) == rows
        assert reading.runs


def test_the_report_names_rows_that_are_far_off(tmp_path):
    outcomes = [outcome(1.0, 1.0), outcome(0.5, 1.0)]
    line = {"file": "x.csv", "rows": 2, **score(outcomes), "left_out": {}}
    write_report({"x.csv": (outcomes, line)}, tmp_path / "page.md")
    assert "x.csv: 1" in (tmp_path / "page.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_fitting_a_cluster_finds_the_constants_that_its_runs_were_made_with():
    """Steps as simulated on a cluster whose kernels take longer, to be told from steps alone."""
    preset = Cluster.preset("dgx-a100-superpod").with_devices(8)
    truth = replace(preset, calibration=Calibration(product_scale=1.25, memory_scale=1.6))
    runs = []
    for microbatch in (1, 2, 4, 8):
        for hidden in (512, 2048):
            model = Model.of("gpt", num_layers=2, hidden=hidden, num_heads=8, batch=64)
            setup = TrainingSetup(microbatch=microbatch)
            run = Run(1, "", ("a", 8), model, truth, (setup,), None)
            seconds = Predictor().outcome(run).seconds
            runs.append(replace(run, cluster=preset, seconds=seconds))
    fitted, line = fit("dgx-a100-superpod", runs)
    assert line["mape_before"] > 10
    assert line["mape_after"] < 0.3 * line["mape_before"]
    assert fitted.calibration.product_scale == pytest.approx(1.25, rel=0.1)


def test_a_run_whose_setup_is_not_told_counts_less_in_a_fit():
    """One run was slower than predicted, another as much faster: who said how it ran is heard."""
    preset = Cluster.preset("dgx-a100-superpod").with_devices(8)
    model = Model.of("gpt", num_layers=2, hidden=1024, num_heads=8, batch=64)
    setup = TrainingSetup(microbatch=8)
    run = Run(1, "", ("a", 8), model, preset, (setup,), None)
    seconds = Predictor().outcome(run).seconds
    told = replace(run, seconds=1.2 * seconds)
    tuned = replace(run, seconds=seconds / 1.2, setups=(setup, TrainingSetup(microbatch=1)))
    steps = [simulation.step_time for _, simulation in Predictor().simulations(tuned)]
    assert seconds == min(steps)
    assert weight_of(steps) < 0.5
    fitted, _ = fit("dgx-a100-superpod", [told, tuned])
    again = Predictor().outcome(replace(run, cluster=fitted.with_devices(8))).seconds
    assert again > 1.1 * seconds


def test_runs_on_other_devices_than_the_calibration_ones_are_stated_too(tmp_path):
    header = (
        "model,seq,gpus,gpu,mfu_pct,hfu_pct,model_tflops_gpu,mbs,grad_acc,gbs,samples_s,tok_s,"
        "tok_s_gpu,gb_tokens,precision,mp_mode,fsdp,act_ckpt,act_offload,params,section,hidden,"
        "layers,heads,vocab,iter_ms,split"
    )
    rows = [
        f"1b,2048,8,{gpu},1,1,1,4,1,32,1,1000,1,1,bf16,PURE,FULL_SHARD,True,{off},1,x,256,2,4,512,1,x"
        for gpu, off in (("h100_80gb", "False"), ("a100_80gb", "True"), ("b200", "False"))
    ]
    path = tmp_path / "mpt.csv"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    kind = set_of(path)
    assert kind is not None
    reading = read_runs(path, kind)
    (run,) = reading.runs
    assert run.cluster.device_types[0].name == "H100-80GB"
    assert run.setups[0].recompute == "full"
    assert set(reading.left_out) == {
        "activations are offloaded to the host",
        "device b200 is not bundled",
    }


ALPA = (
    "file,exp,instance,gpu,hosts,gpus,family,method,tflops_per_gpu,latency_s_mean,latency_s_all,"
    "peak_mem_GB,param_B,failed,timestamp,model,seq,hidden,layers,heads,vocab,gbs,experts,"
    "base_channels,width_factor"
)


def test_wide_resnets_keep_activations_and_their_convolutions_are_not_tuned(tmp_path):
    path = tmp_path / "alpa.csv"
    row = "x,e2e,p3,V100-16GB,1,1,wresnet,intra_only,9,40,,10,0.2,0,1,250M,,,50,,,96,,16,2"
    path.write_text(f"{ALPA}\n{row}\n", encoding="utf-8")
    kind = set_of(path)
    assert kind is not None
    (run,) = read_runs(path, kind).runs
    assert {setup.recompute for setup in run.setups} == {"none"}
    assert {setup.microbatch for setup in run.setups} == {2}
    assert run.peak_bytes == 10 * 2**30
    (device,) = run.cluster.device_types
    gains = {each.winograd * each.winograd_backward for each in device.products.values()}
    assert gains == {1.0}
    assert Predictor().outcome(run).seconds > 0


def test_alpas_methods_train_as_its_scripts_say(tmp_path):
    path = tmp_path / "alpa.csv"
    rows = (
        "x,e2e,p3,V100-16GB,1,2,moe,inter_only,9,40,,10,0.7,0,1,690M,1024,768,8,16,32000,1024,16,,",
        "x,e2e,p3,V100-16GB,1,2,moe,deepspeed,9,40,,,0.7,0,1,690M,1024,768,8,16,32000,1024,16,,",
        "x,e2e,p3,V100-16GB,1,2,gpt,inter_only,9,40,,10,0.8,0,1,760M,1024,1536,24,16,51200,1024,,,",
    )
    path.write_text("\n".join((ALPA, *rows)), encoding="utf-8")
    kind = set_of(path)
    assert kind is not None
    mixture, other, gpt = read_runs(path, kind).runs
    optimizers = [{s.training.optimizer for s in run.setups} for run in (mixture, other, gpt)]
    assert optimizers == [{"sgd"}, {"adam"}, {"adam"}]
    assert max(setup.microbatch for setup in gpt.setups) == 16
    assert max(setup.microbatch for setup in other.setups) > 16
