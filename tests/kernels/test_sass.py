"""Clocks counted in machine code, on listings small enough to count by hand."""

from benchmarks.readings.sass import Clocks, inner_loops, programs_per_sm

# A loop over products with a wait inside, a loop of copies, and a wait at length.
MATMUL = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR17], R4 ;
        /*0020*/              @!P1 BRA `(.L_x_9) ;
.L_x_2:
        /*0030*/                   LDS.64 R162, [R161+0xd000] ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R56, gdesc[UR8], RZ, !UPT ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R88, R24, gdesc[UR8], R88 ;
        /*0060*/                   LOP3.LUT R167, R162, R16, RZ, 0x3c, !PT ;
        /*0070*/                   IMAD R167, R167, 0x7feb352d, RZ ;
        /*0080*/                   FFMA R1, R2, R3, R4 ;
        /*0090*/                   MUFU.EX2 R1, R2 ;
        /*00a0*/               @P1 BRA `(.L_x_1) ;
.L_x_3:
        /*00b0*/                   STS.128 [R1], R4 ;
        /*00c0*/               @P1 BRA `(.L_x_3) ;
        /*00d0*/                   EXIT ;
.L_x_9:
        /*00e0*/                   NANOSLEEP 0x10 ;
        /*00f0*/              @!P1 BRA `(.L_x_2) ;
"""


def test_the_loop_of_products_is_found():
    found = list(inner_loops(MATMUL))
    # 64 and 32 clocks of products; operands of (128 + 64) and 64 rows of 32 bytes, at
    # 128 bytes a clock, and two words of a thread.
    clocks = Clocks(tensor=96, issue=10, alu=2, fma=2, mufu=8, shared=48 + 16 + 8)
    assert found == [clocks]
    assert clocks.busiest == 96


def test_nested_loops_of_products_are_counted_once():
    outer = MATMUL.replace(
        "/*00d0*/", "/*00d0*/  @P2 BRA `(.L_x_0) ;\n        /*00d1*/"
    )
    outer = outer.replace("/*0000*/", "/*0000*/ NOP ;\n.L_x_0:\n        /*0001*/", 1)
    assert list(inner_loops(outer)) == list(inner_loops(MATMUL))


def test_a_kernel_without_loops_is_counted_whole():
    code = "\n".join(
        f"        /*{i:04x}*/                   {x} ;"
        for i, x in enumerate(["FADD R1, R2, R3", "@P1 FADD R1, R2, R3", "EXIT"])
    )
    assert list(inner_loops(code)) == [Clocks(0, 3, 0, 2, 0, 0)]


def test_what_an_sm_holds():
    assert programs_per_sm(registers=240, threads=128, shared=50_000) == 2
    assert programs_per_sm(registers=32, threads=128, shared=100_000) == 2
    assert programs_per_sm(registers=16, threads=128, shared=0) == 16
