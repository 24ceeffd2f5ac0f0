"""Output of nccl-tests: what its tables say, in all their forms, and what is refused."""

from __future__ import annotations

import pytest

from stratagem.profiler import Environment, Measurement
from stratagem.profiler.imports.nccl_tests import looks_like_nccl_tests, read_nccl_tests
from stratagem.simulator.hardware.collective_kinds import Collective

_HALF = "   time   algbw   busbw #wrong"
HEADINGS = (
    f"#\n#{' ' * 62}out-of-place{' ' * 23}in-place\n"
    f"#       size         count      type   redop    root  {_HALF}  {_HALF}\n"
    f"#        (B)    (elements){' ' * 31}(us)  (GB/s)  (GB/s){' ' * 12}(us)  (GB/s)  (GB/s)\n"
)
ROWS = (
    "           8             2     float     sum      -1    29.35    0.00    0.00      0"
    "    29.61    0.00    0.00      0\n"
    "    33554432       8388608     float     sum      -1    310.7  108.00  189.00      0"
    "    309.5  108.41  189.72      0\n"
    "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 94.68\n"
)
PARAMETERS = (
    "# nThread 1 nGpus 8 minBytes 8 maxBytes 33554432 step: 2(factor) warmup iters: 5 iters: 20 "
    "agg iters: 1 validation: 1 graph: 0\n#\n# Using devices\n"
)
NEW = "# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807\n"
GPU = "NVIDIA A100-SXM4-40GB"


def starting(program: str) -> str:
    return f"{NEW}# Collective test starting: {program}_perf\n"


def ranks(count: int, nodes: int = 1, device: str = GPU) -> str:
    each = count // nodes
    return "".join(
        f"#  Rank {r:2} Group  0 Pid {33391 + r:6} on   node{r // each:02} device {r % each:2} "
        f"[0x0{r % each}] {device}\n"
        for r in range(count)
    )


def row(nbytes: int, micros: float, factor: float, redop: str = "none", root: int = -1) -> str:
    speed = nbytes / micros * 1e-3
    body = f"{micros:9.2f}  {speed:6.2f}  {speed * factor:6.2f}"
    count = f"{nbytes // 4:12}     float  {redop:>6}  {root:6}"
    return f"{nbytes:12} {count} {body}      0 {body}    N/A\n"


def log(program: str, count: int, rows: str, nodes: int = 1) -> str:
    return starting(program) + PARAMETERS + ranks(count, nodes) + HEADINGS + rows


ALL_REDUCE = starting("all_reduce") + PARAMETERS + ranks(8) + HEADINGS + ROWS


class TestTables:
    def test_an_all_reduce(self):
        entries, left_out = read_nccl_tests(ALL_REDUCE, "x", timestamp=5.0)
        small, large = entries
        assert (small.key.kind, small.key.nbytes, small.key.size) == (Collective.ALL_REDUCE, 8, 8)
        assert (large.key.nbytes, large.timestamp) == (33554432, 5.0)
        seconds = large.measurement.median_s
        assert seconds == pytest.approx(310.7e-6)
        assert large.measurement == Measurement(seconds, 0.0, 20, origin="nccl-tests")
        assert large.key.environment == Environment(GPU, "", nccl="2.28.7")
        assert (large.key.backend, large.key.link, large.key.num_nodes) == (
            "nccl",
            "intra-node",
            1,
        )
        assert not left_out

    @pytest.mark.parametrize(
        ("program", "kind", "factor"),
        [
            ("all_reduce", Collective.ALL_REDUCE, 1.5),
            ("all_gather", Collective.ALL_GATHER, 0.75),
            ("reduce_scatter", Collective.REDUCE_SCATTER, 0.75),
            ("alltoall", Collective.ALL_TO_ALL, 0.75),
            ("broadcast", Collective.BROADCAST, 1.0),
            ("reduce", Collective.REDUCE, 1.0),
            ("scatter", Collective.SCATTER, 0.75),
            ("gather", Collective.GATHER, 0.75),
            ("sendrecv", Collective.SEND, 1.0),
        ],
    )
    def test_every_program(self, program, kind, factor):
        text = log(
            program, 4, "".join(row(2**i, 10.0 + 2**i / 1e4, factor) for i in range(10, 30))
        )
        entries, _ = read_nccl_tests(text, "x")
        assert {(e.key.kind, e.key.size) for e in entries} == {(kind, 4)}
        assert [e.key.nbytes for e in entries] == [2**i for i in range(10, 30)]

    def test_several_nodes(self):
        text = log("all_reduce", 8, ROWS, nodes=2)
        entries, _ = read_nccl_tests(text, "x")
        assert {(e.key.link, e.key.num_nodes, e.key.size) for e in entries} == {
            ("inter-node", 2, 8)
        }

    def test_the_older_form(self):
        text = (
            "$ mpirun -np 2 ./build/broadcast_perf -b 8 -e 128M\n"
            "# nThread 1 nGpus 2 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 100 "
            "validation: 1\n#\n# Using devices\n"
            "#   Rank  0 Pid   1320 on  here device  0 [0x00] Tesla V100-SXM2-16GB\n"
            "#   Rank  1 Pid   1320 on  here device  1 [0x00] Tesla V100-SXM2-16GB\n"
            "#\n#                                    out-of-place                in-place\n"
            "#       size         count    type   root     time   algbw   busbw  error     time"
            "   algbw   busbw  error\n"
            "     1048576        262144   float      0    162.0    6.47    6.47  0e+00    161.0"
            "    6.51    6.51  0e+00\n"
        )
        (entry,), _ = read_nccl_tests(text, "x")
        assert entry.key.kind is Collective.BROADCAST
        assert entry.key.environment.device == "Tesla V100-SXM2-16GB"
        assert entry.measurement.median_s == pytest.approx(162e-6)
        assert entry.measurement.repeats == 100

    def test_other_lines_of_a_log_are_passed_over(self):
        noise = (
            "node1:117950:118334 [6] NCCL INFO comm 0x7f rank 9 nranks 32 - Init COMPLETE\n"
            "15 more processes have sent help message help-mca-var.txt\n"
            "/opt/build/all_reduce_perf: libnl-3.so.200: no version information available\n"
        )
        noisy = "".join(f"{noise}{line}" for line in ALL_REDUCE.splitlines(keepends=True))
        assert _content(noisy) == _content(ALL_REDUCE)

    def test_several_runs_in_one_file(self):
        gather = log("all_gather", 4, row(2**20, 50.0, 0.75))
        entries, _ = read_nccl_tests(ALL_REDUCE + gather + ALL_REDUCE, "x")
        found = {(e.key.kind, e.key.nbytes, e.key.size): e.measurement for e in entries}
        assert len(found) == 3
        assert found[Collective.ALL_GATHER, 2**20, 4].repeats == 20
        assert found[Collective.ALL_REDUCE, 8, 8].repeats == 40

    def test_rows_that_mean_nothing_are_counted(self):
        wrong = ROWS.replace("0.00      0    29.61", "0.00      3    29.61")
        rows = row(0, 5.0, 0.0) + row(0, 5.1, 0.0) + wrong
        entries, left_out = read_nccl_tests(log("all_reduce", 8, rows), "x")
        assert [e.key.nbytes for e in entries] == [33554432]
        assert left_out == {"rows of 0 bytes": 2, "rows with wrong results": 1}

    def test_what_the_output_does_not_say_can_be_told(self):
        text = PARAMETERS + ranks(8) + HEADINGS + ROWS
        base = Environment("", "", driver="570.86", nccl="2.20.5")
        entries, _ = read_nccl_tests(
            text, "x", environment=base, kind="all_reduce", link="NVSwitch"
        )
        assert entries[0].key.environment == Environment(GPU, "", driver="570.86", nccl="2.20.5")
        assert entries[0].key.link == "NVSwitch"

    def test_it_is_recognised(self):
        assert looks_like_nccl_tests(ALL_REDUCE)
        assert not looks_like_nccl_tests("size,count,type\n1,2,float\n")


class TestRefused:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("nothing of it", " has no table of nccl-tests"),
            (PARAMETERS + ranks(8) + HEADINGS + ROWS, r"line 16: .*give --kind, one of all_red"),
            (log("all_gather", 8, ROWS), r"line 19: busbw 189.00 is 1.750 times .* it is 0.875"),
            (starting("all_reduce") + PARAMETERS + HEADINGS + ROWS, "does not list its ranks"),
            (log("all_reduce", 8, ROWS.replace("310.7", "fast")), "line 19, field time: 'fast'"),
            (log("all_reduce", 8, ROWS.replace("29.35 ", " 0.00 ")), "line 18, field time: 0.00"),
            (log("all_reduce", 8, ROWS.replace("309.5", "")), "12 fields, .* has 13 columns"),
            (
                log("all_reduce", 8, ROWS).replace("Rank  1 ", "Rank  0 "),
                "its 8 ranks have only 7 numbers: each process ran alone; build .* MPI=1",
            ),
            (
                log("all_reduce", 8, ROWS).replace("Rank  7 Group  0", "Rank  7 Group  1"),
                "ranks of several kinds .*groups 0, 1",
            ),
            (
                log("all_reduce", 8, ROWS).replace(f"[0x07] {GPU}", "[0x07] NVIDIA H100"),
                "ranks of several kinds .*NVIDIA A100-SXM4-40GB, NVIDIA H100",
            ),
            (
                log("all_reduce", 8, ROWS, nodes=2).replace(
                    "on   node01 device  0", "on  node00 device  4"
                ),
                r"unequally spread \(5 on node00, 3 on node01\)",
            ),
        ],
        ids=lambda value: "" if "\n" in value else value[:20],
    )
    def test_it_names_the_file_and_the_line(self, text, message):
        with pytest.raises(ValueError, match=rf"^x.*{message}"):
            read_nccl_tests(text, "x")

    def test_a_device_that_the_output_contradicts(self):
        with pytest.raises(ValueError, match=r"x: it ran on 'NVIDIA A100.*, not on 'H100'"):
            read_nccl_tests(ALL_REDUCE, "x", environment=Environment("H100", ""))

    def test_a_misspelt_kind(self):
        with pytest.raises(ValueError, match=r"no kind 'allreduce' .did you mean 'all_reduce'"):
            read_nccl_tests(ALL_REDUCE, "x", kind="allreduce")

    def test_a_kind_that_the_output_contradicts(self):
        with pytest.raises(
            ValueError, match="told to be all-gather, but the output is of all-red"
        ):
            read_nccl_tests(ALL_REDUCE, "x", kind="all_gather")


def _content(text: str) -> list[object]:
    entries, _ = read_nccl_tests(text, "x")
    return [(entry.key, entry.measurement) for entry in entries]
