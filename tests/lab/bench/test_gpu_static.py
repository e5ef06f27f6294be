"""What is known of GPU kernels without a GPU: what is read off compiled code, and what follows from sizes."""

import sys
from dataclasses import replace
from importlib import util

import pytest
import torch
from typer.testing import CliRunner

from pairmix import Schedule, SPMLinear
from pairmix_lab import cli
from pairmix_lab.bench import gpu_static
from pairmix_lab.bench.gpu_compile import (
    AMD,
    GPUS,
    NVIDIA,
    amd_mnemonics,
    amd_resources,
    compiled,
    instruction_counts,
    nvidia_mnemonics,
    nvidia_resources,
    resident_programs,
)
from pairmix_lab.bench.gpu_launches import Case, Traffic, launches_of, recorded, traffic
from pairmix_lab.bench.jobs import Finished
from pairmix_lab.report.pictures import as_file

needs_triton = pytest.mark.skipif(util.find_spec("triton") is None, reason="needs Triton")

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function forward_pass:
  REG:128 STACK:8 SHARED:0 LOCAL:16 CONSTANT[0]:440 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;                          /* 0x00000a0000017a02 */
                                                                                  /* 0x000fe40000000f00 */
        /*0010*/              @!P0 LDG.E.128 R4, [R2.64] ;                         /* 0x0000000402047981 */
        /*0020*/                   LDG.E R8, [R2.64+0x10] ;                        /* 0x0000000402047981 */
        /*0030*/             @!UP1 STG.E.64 [R2.64], R4 ;                          /* 0x0000000402047981 */
        /*0040*/                   LDSM.16.M88.4 R4, [R9] ;                        /* 0x0000000402047981 */
        /*0050*/                   STS.128 [R9], R4 ;                              /* 0x0000000402047981 */
        /*0060*/                   SHFL.BFLY PT, R4, R5, 0x1, 0x1f ;               /* 0x0000000402047981 */
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;                   /* 0x0000000402047981 */
        /*0080*/                   FFMA R4, R5, R6, R7 ;                           /* 0x0000000402047981 */
        /*10090*/                  STL [R1], R2 ;                                  /* 0x0000000402047981 */
"""
AMDGCN = """
forward_pass:
\tbuffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen
\tbuffer_load_ushort v0, v4, s[0:3], 0 offen
\tglobal_store_dwordx2 v[0:1], v[2:3], s[0:1]
\tds_read_b128 v[0:3], v4
\tds_write2st64_b64 v0, v[1:2], v[3:4]
\tds_swizzle_b32 v0, v1 offset:swizzle(SWAP,1)
\tv_mov_b32_dpp v0, v1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf
\ts_barrier
\tv_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]
\tv_fmac_f32_e32 v0, v1, v2
    .private_segment_fixed_size: 12
    .sgpr_spill_count: 40
    .vgpr_count:     226
    .vgpr_spill_count: 2
"""


class TestDisassembly:
    def test_nvidia(self):
        assert nvidia_resources(USAGE) == {"registers": 128, "spilled_bytes": 24}
        counts = instruction_counts(nvidia_mnemonics(SASS), NVIDIA)
        assert {kind: count for kind, count in counts.items() if count} == {
            "global loads, 16 bytes": 1,
            "global loads, 4 bytes or fewer": 1,
            "global stores, 8 bytes": 1,
            "shared loads": 1,
            "shared stores": 1,
            "shuffles": 1,
            "barriers": 1,
            "multiply-adds": 1,
            "spill loads and stores": 1,
        }

    def test_amd(self):
        assert amd_resources(AMDGCN) == {"registers": 226, "spilled_bytes": 12}
        counts = instruction_counts(amd_mnemonics(AMDGCN), AMD)
        assert {kind: count for kind, count in counts.items() if count} == {
            "global loads, 16 bytes": 1,
            "global loads, 4 bytes or fewer": 1,
            "global stores, 8 bytes": 1,
            "shared loads": 1,
            "shared stores": 1,
            "shuffles": 2,
            "barriers": 1,
            "multiply-adds": 3,
        }


@pytest.mark.parametrize(
    ("architecture", "registers", "threads", "shared", "programs"),
    [
        ("sm_80", 32, 1024, 0, 2),  # limited by threads
        ("sm_80", 128, 512, 0, 1),  # by registers: 16 warps of 128 x 32 are all there are
        ("sm_80", 129, 256, 0, 1),  # by registers, which are given out in eights
        ("sm_80", 32, 64, 63 << 10, 2),  # by shared memory, of which a program costs 1 KiB more
        ("sm_90", 32, 64, 0, 32),  # by the number of programs
        ("gfx942", 226, 512, 0, 1),  # 2 waves in each of 4 parts, as LLVM says of 226 registers
        ("gfx942", 64, 256, 32 << 10, 2),
    ],
)
def test_resident_programs(architecture, registers, threads, shared, programs):
    assert resident_programs(GPUS[architecture], registers, threads, shared) == programs


CASE = Case(16, "butterfly", "general", "float32", "forward")
BACKWARD = replace(CASE, direction="backward")


def launched(case, batch=64, multiprocessors=2, warp_size=32):
    return recorded(case, batch, multiprocessors, warp_size)


@needs_triton
class TestLaunches:
    @pytest.mark.parametrize(
        ("case", "kernels"),
        [
            (CASE, ["forward_pass"]),
            (BACKWARD, ["backward_pass", "reduce_slots"]),
            (replace(CASE, block="rotation"), ["forward_pass"]),
            (replace(CASE, n=8192), 2 * ["forward_pass"]),
            (replace(BACKWARD, n=8192), ["forward_pass", "backward_pass", "backward_pass", "reduce_slots"]),
        ],
    )
    def test_names(self, case, kernels):
        assert [launch.name for launch in launched(case).launches] == kernels

    def test_warps_and_workers_are_those_of_the_device(self):
        (small,) = launched(CASE).launches
        (wide,) = launched(CASE, warp_size=64).launches
        assert small.options["num_warps"] == 2 * wide.options["num_warps"]
        few, many = (launched(BACKWARD, 10_000, count).launches[0].grid[0] for count in (2, 4))
        assert many == 2 * few

    def test_bytes_that_are_needed(self):
        x, parameters = 64 * 16 * 4, (4 * 4 * 8 + 3 * 16) * 4
        assert launched(CASE).needed_bytes == 2 * x + parameters
        assert launched(BACKWARD).needed_bytes == 3 * x + 2 * parameters
        assert launched(replace(CASE, dtype="bfloat16")).needed_bytes == x + parameters


@needs_triton
class TestTraffic:
    x = 256 * 16 * 4
    blocks, diagonal = 4 * 4 * 8 * 4, 16 * 4

    def of(self, case, batch=256):
        launch = launched(case, batch).launches[0]
        return launch, traffic(launch), -(-batch // launch.arguments["R"])

    def test_forward(self):
        _, found, row_tiles = self.of(CASE)
        read_again = self.blocks + 3 * self.diagonal
        assert row_tiles > 1
        assert found == Traffic(
            2 * self.x, read_again, 2 * self.x + row_tiles * read_again, multiply_adds=256 * 8 * 4 * 4
        )

    def test_backward_computes_stages_again_and_adds_to_slots(self):
        launch, found, row_tiles = self.of(BACKWARD)
        assert launch.arguments["HELD"] == 2
        stage, slot = self.blocks // 4, self.blocks + 3 * self.diagonal
        forwards = 4 + 1  # the first of two groups is computed again, but for its output
        assert found.multiply_adds == 256 * 8 * (4 * forwards + 8 * 4)
        read_again = (forwards + 4) * stage + 4 * self.diagonal  # d_in with x, again with x, and with the result
        x_again = 2 * self.x  # for the first group, and for the gradient of d_in
        assert found.cached == 3 * self.x + x_again + row_tiles * (read_again + 2 * slot)
        assert found.reused == self.blocks + 2 * self.diagonal + launch.grid[0] * slot

    def test_random_pairs_go_through_memory(self):
        launch, found, row_tiles = self.of(replace(CASE, pairs="random"))
        exchanged = 2 * sum(stride == 0 for stride in launch.arguments["STRIDES"])
        assert exchanged > 0
        tile = launch.arguments["R"] * 16 * 4
        tables = exchanged * 16 * 4
        again = self.blocks + 3 * self.diagonal + tables
        assert found.cached == 2 * self.x + row_tiles * (again + exchanged * tile)

    def test_the_small_kernels_move_everything_once(self):
        *_, reduce = launched(BACKWARD).launches
        sizes = [value.nbytes for value in reduce.arguments.values() if hasattr(value, "nbytes")]
        assert traffic(reduce) == Traffic(sum(sizes), 0, sum(sizes), 0)

    def test_what_does_not_fit_into_the_cache_is_read_again_from_memory(self):
        one = Traffic(rows=1000, reused=100, cached=1500, multiply_adds=0)
        assert one.dram(100) == one.dram(10**6) == 1100
        assert one.dram(75) == 1100 + 0.25 * 400
        assert one.dram(0) == 1500


@needs_triton
def test_bytes_in_the_code_beside_those_computed():
    (launch,) = launched(CASE, 256).launches
    counts = {"global loads, 16 bytes": 3, "global stores, 4 bytes or fewer": 2, "shuffles": 9}
    row_tiles = 256 // launch.arguments["R"]
    computed = Traffic(0, 0, cached=row_tiles * 64 * 28, multiply_adds=1)
    kernel = {"threads": 64, "instructions": counts}
    assert gpu_static.of_cache_traffic(kernel, launch, computed) == pytest.approx(2.0)
    assert gpu_static.of_cache_traffic(kernel, launch, replace(computed, multiply_adds=0)) is None


def test_a_prediction_is_the_sum_of_what_limits_each_launch():
    gpu = GPUS["sm_80"]._replace(cache_bytes=1000, dram_rate=100.0, cache_rate=1000.0, multiply_add_rate=10.0)
    moved = [Traffic(200, 100, 300, 0), Traffic(0, 0, 5000, 20), Traffic(0, 0, 0, 70)]
    found = gpu_static.predicted(gpu, 400, moved)
    assert found == {
        "ms": pytest.approx(1e3 * (3 + 5 + 7)),
        "of_memcpy": pytest.approx(4 / 15),
        "bounds": ["DRAM", "cache", "arithmetic"],
    }


def made_up_kernel(name, **changes):
    kernel = {"kernel": name, "rows": 8, "registers": 100, "spilled_bytes": 0, "threads": 256}
    counts = dict.fromkeys(NVIDIA.values(), 2)
    more = {"shared_bytes": 8192, "programs": 1, "occupancy": 0.25, "of_cache_traffic": 1.25, "compile_seconds": 1.0}
    return {**kernel, **more, "instructions": counts, **changes}


def made_up_rows():
    def row(n, dtype, direction, target, **changes):
        about = {"n": n, "pairs": "butterfly", "block": "general", "dtype": dtype, "direction": direction}
        return {
            **about, "target": target, "gpu": GPUS[target].name, "batch": 64, "stages": 8,
            "kernels": [made_up_kernel(f"{direction}_pass", **changes), made_up_kernel("reduce_slots", registers=7)],
            "needed_bytes": 2**20, "dram_bytes": 3 * 2**19, "cache_traffic_bytes": 2**22, "reused_bytes": 2**18,
            "predicted": {"ms": 0.5, "of_memcpy": 0.4, "bounds": ["DRAM", "cache", "DRAM"]},
        }  # fmt: skip

    return [
        row(256, "float32", "forward", "sm_80"),
        row(256, "bfloat16", "forward", "sm_80", registers=120),
        row(256, "float32", "backward", "sm_80", spilled_bytes=8),
        row(8192, "float32", "backward", "gfx942", spilled_bytes=16),
    ]


class TestTables:
    def test_registers_are_ranges_over_dtypes(self):
        header, *lines = gpu_static.table(made_up_rows())
        assert len(lines) == 3
        assert lines[0][header.index("rows of a tile")] == "8"
        assert lines[0][header.index("registers")] == "100 to 120"
        assert lines[0][header.index("shared, KiB")] == "8"
        assert lines[0][header.index("occupancy")] == "25%"

    def test_bytes_over_the_target_are_marked_where_one_tile_holds_a_row(self):
        header, *lines = gpu_static.bytes_table(made_up_rows())
        nvidia, amd = (header.index(f"{name}: DRAM") for name in ("A100 80GB", "MI300X"))
        assert [line[nvidia] for line in lines] == ["1.50 (over)", "1.50 (over)", "1.50", "-"]
        assert [line[amd] for line in lines] == ["-", "-", "-", "1.50"]
        assert lines[0][nvidia + 1 : nvidia + 3] == ["4.0", "0.250 MiB"]

    def test_predictions_say_that_they_are(self):
        header, *lines = gpu_static.prediction_table(made_up_rows())
        assert sum(gpu_static.PREDICTED in title for title in header) == 2
        assert lines[0][header.index("A100 80GB: limited by")] == "DRAM, cache"
        assert lines[0][header.index("A100 80GB: limited by") - 1] == "40%"

    def test_instructions_are_those_of_the_stages(self):
        header, *lines = gpu_static.instructions_table(made_up_rows())
        assert len(lines) == 3
        assert lines[0][header.index("shuffles")] == "2"
        assert lines[0][header.index("bytes of global loads and stores / computed")] == "1.25"

    def test_spills_are_named_unless_there_are_several_passes(self):
        (spilled,) = gpu_static.spilling(made_up_rows())
        assert spilled == "backward_pass for sm_80, n = 256, butterfly, general, float32: 8 bytes"


def test_the_picture_says_that_nothing_was_measured():
    figure = gpu_static.picture(made_up_rows())
    assert figure.axes[0].get_title("left") == gpu_static.PREDICTED
    assert [text.get_text() for text in figure.legends[0].get_texts()][:2] == [
        "A100 80GB, forward",
        "A100 80GB, backward",
    ]
    assert as_file(figure, "png").startswith(b"\x89PNG")


TINY = gpu_static.Config((16,), (), ("float32",), ("general",), ("sm_80",), batch=64)


class TestRun:
    @needs_triton
    def test_compiles_without_a_gpu(self, monkeypatch, tmp_path):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
        config = replace(TINY, widths=(2,))
        finished, seen = Finished(tmp_path / "part.jsonl"), []
        rows = gpu_static.run(config, finished, on_case=lambda: seen.append(1))
        assert len(seen) == len(rows) == 2
        for row, names in zip(rows, (["forward_pass"], ["backward_pass", "reduce_slots"]), strict=True):
            assert [kernel["kernel"] for kernel in row["kernels"]] == names
            assert row["stages"] == Schedule.butterfly(2).stages
            main = row["kernels"][0]
            assert 0 < main["registers"] <= 255
            assert main["spilled_bytes"] == 0
            assert 0 < main["occupancy"] <= 1
            assert main["instructions"]["multiply-adds"] > 0
            assert main["instructions"]["spill loads and stores"] == 0

        def fail(*arguments):
            raise AssertionError("it was compiled already")

        monkeypatch.setattr(gpu_static, "compile_call", fail)
        kept = Finished(tmp_path / "part.jsonl", resume=True)
        assert [row["kernels"][0]["registers"] for row in gpu_static.run(config, kept)] == [
            row["kernels"][0]["registers"] for row in rows
        ]

    @pytest.mark.parametrize("name", ["TRITON_INTERPRET", "PAIRMIX_AUTOTUNE"])
    def test_what_would_compile_something_else_is_refused(self, monkeypatch, tmp_path, name):
        monkeypatch.setenv(name, "1")
        monkeypatch.setattr(util, "find_spec", lambda package: object())
        with pytest.raises(ValueError, match=f"does not run with {name}=1"):
            gpu_static.run(TINY, Finished(tmp_path / "part.jsonl"))

    def test_without_triton_it_says_what_to_install(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.setattr(util, "find_spec", lambda package: None)
        result = CliRunner().invoke(cli.app, ["bench", "gpu-static", "--out", str(tmp_path / "out")])
        assert result.exit_code == 1
        assert "pip install 'pairmix[gpu]'" in result.output

    def test_unknown_targets_are_refused(self):
        result = CliRunner().invoke(cli.app, ["bench", "gpu-static", "--targets", "sm_12"])
        assert result.exit_code == 2
        assert "sm_80, sm_90, gfx942" in " ".join(result.output.split())


@needs_triton
@pytest.mark.parametrize(
    ("schedule", "block", "architecture"),
    [
        (Schedule.butterfly(16, 2), "general", "sm_80"),
        (Schedule.random(7, 2), "rotation", "sm_90"),
        (Schedule.butterfly(12, 2), "general", "gfx942"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("direction", "passes"), [("forward", ["forward_pass"]), ("backward", ["backward_pass", "reduce_slots"])]
)
def test_kernels_of_other_layers_compile(schedule, block, architecture, direction, passes):
    """Of odd and of rectangular ones. The interpreter accepts what the compiler does not."""
    layer = SPMLinear(schedule.n - 3, schedule.n, block=block, schedule=schedule, residual="scale", device="meta")
    x = torch.empty(4096, layer.in_features, dtype=torch.bfloat16, device="meta")
    found = launches_of(layer, x, direction, multiprocessors=100, warp_size=32 if architecture.startswith("sm") else 64)
    assert [launch.name for launch in found] == passes
    assert all(compiled(launch, architecture)["registers"] > 0 for launch in found)


@needs_triton
@pytest.mark.parametrize("schedule", [Schedule.butterfly(16, 2), Schedule.random(16, 2)], ids=["butterfly", "random"])
def test_the_kernel_of_a_frozen_layer_compiles(schedule):
    """It has no sums to add to: only the gradient of x."""
    layer = SPMLinear(16, 16, schedule=schedule, device="meta").requires_grad_(False)
    (found,) = launches_of(layer, torch.empty(64, 16, device="meta"), "backward", multiprocessors=100, warp_size=32)
    assert found.name == "backward_pass"
    assert compiled(found, "sm_80")["registers"] > 0
