"""Main loops read from machine code."""

from support.sass import MainLoop, main_loops

HEADER = '\t\tFunction : {}\n\t.headerflags\t@"EF_CUDA_SM86"\n'
LINES = (
    "MOV R1, c[0x0][0x28]",
    "LDSM.16.M88.4 R4, [R2]",
    "IMMA.16832.S8.S8.SAT R8, R4.ROW, R6.COL, R8",
    "@P0 IADD3 R2, R2, 0x40, RZ",
    "IMMA.16832.S8.S8.SAT R12, R4.ROW, R7.COL, R12",
    "@!P0 BRA 0x10",
    "@P1 BRA 0x0",
    "EXIT",
    "BRA 0x80",
)


def listing(name, lines):
    """What `cuobjdump -sass` prints of one kernel."""
    body = "".join(
        f"        /*{16 * number:04x}*/                   {line} ;  /* 0x0 */\n" for number, line in enumerate(lines)
    )
    return HEADER.format(name) + body


def test_the_innermost_loop_counts():
    """Of a warp, and of a warp group; a kernel without a loop has none."""
    wide = [line.replace("IMMA.16832", "IGMMA.64x128x32") for line in LINES]
    straight = [line for line in LINES if "BRA" not in line]
    sass = listing("gemm", LINES) + listing("straight", straight) + listing("wide", wide)
    loops = MainLoop(2, 5, 2 * 16 * 8 * 32), MainLoop(tensor=2, instructions=5, operations=2 * 64 * 128 * 32)
    assert list(main_loops(sass)) == list(zip(("gemm", "wide"), loops, strict=True))
