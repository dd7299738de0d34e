"""Names of textbook plans."""

import pytest

from tutti.plan.pipeline.schedule import Pipe
from tutti.plan.textbook import Textbook, parse_name, refined


@pytest.mark.parametrize(
    ("name", "devices", "book"),
    [
        ("dp", 4, Textbook(4, 1, 0)),
        ("tp", 6, Textbook(1, 6, 0)),
        ("single", 1, Textbook()),
        ("dp1", 1, Textbook()),
        ("zero3", 4, Textbook(4, 1, 3)),
        ("tp2xzero1", 8, Textbook(4, 2, 1)),
        ("dp2xtp", 6, Textbook(2, 3, 0)),
        ("dp2xtp2xzero2", 4, Textbook(2, 2, 2)),
        ("ep", 4, Textbook(ep=4)),
        ("dp2xep2", 4, Textbook(2, ep=2)),
        ("tp2xep", 4, Textbook(tp=2, ep=2)),
        ("ep2xzero1", 4, Textbook(2, 1, 1, ep=2)),
        ("pp2xep2", 4, Textbook(ep=2, pipe=Pipe(2))),
        ("cp", 4, Textbook(cp=4)),
        ("dp2xcp2", 4, Textbook(2, cp=2)),
        ("dp8xzero3xshard4", 8, Textbook(8, zero=3, shard=4)),
        ("dp2xzero1xmxfp8", 2, Textbook(2, zero=1, matmul_dtype="mxfp8")),
        ("dp2xrecompute-normxnvfp4", 2, Textbook(2, recompute=True, again=("norm",), matmul_dtype="nvfp4")),
        ("pp2-dualpipevxdp2", 4, Textbook(2, pipe=Pipe(2, "dualpipev", 2))),
        ("dp4xtp2xexperts8", 8, Textbook(ep=4, tp=2, folded=True)),
        ("tp2xexperts", 8, Textbook(ep=4, tp=2, folded=True)),
        ("dp4xtp2xexperts4xzero1", 8, Textbook(2, 2, 1, ep=2, folded=True)),
        ("dp4xtp2xexperts2", 8, Textbook(4, 2, folded=True)),
        ("tp4xzero1xrecompute-attention", 8, Textbook(2, 4, 1, recompute=True, again=("attention",))),
        (
            "dp2xrecompute-_softmax+gluxsplits2",
            2,
            Textbook(2, recompute=True, again=("_softmax", "glu"), batch_splits=2),
        ),
        ("dp4xfp32sumsxfp8", 4, Textbook(4, sum_dtype="float32", matmul_dtype="float8")),
        ("dp4xmxfp8xreround", 4, Textbook(4, matmul_dtype="mxfp8", reround=True)),
        ("dp4xfp32sums", 4, Textbook(4, sum_dtype="float32")),
        ("dp2xtp2xspxrecompute", 4, Textbook(2, 2, recompute=True, sp=True)),
        ("tp4xexperts4", 4, Textbook(tp=4, folded=True)),
        ("pp2-seq1f1b4xdp", 4, Textbook(2, pipe=Pipe(2, "seq1f1b", sequence_chunks=4))),
    ],
)
def test_names(name, devices, book):
    assert parse_name(name, devices) == book
    assert parse_name(str(book), devices) == book


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sp", "needs 1 device, not 4: say how they are used, as in 'dpxsp'"),
        ("tp4xzero3", "ZeRO splits over dp, cp and ep, which have one device each"),
        ("dpxsp", "sp splits the sequence over tp; add tp2 or more"),
        ("pp4-seq1f1b", "seq1f1b with one of chunks of the sequence, pp4-seq1f1b4"),
        ("pp4-seq1f1b0", "seq1f1b with one of chunks of the sequence, pp4-seq1f1b4"),
        ("pp4-1f1b2", "others with none"),
        ("pp0", "an axis has at least one device"),
        ("sum2", "no plan 'sum2': write auto, .* or the path of a saved plan"),
        ("ep3", "needs 3 devices, not 4"),
        ("dp2xtp2xexperts3", "experts over 3 of 2 x 2 devices; possible are experts2, experts4"),
        ("dp2xep2xexperts2", "experts are spread over ep, or over experts of dp x tp, not both"),
        ("zero4", r"no plan 'zero4': did you mean 'zero3'\? Write auto, dp, tp"),
        ("tp2xzeor1", "no plan 'tp2xzeor1': did you mean 'tp2xzero1'?"),
        ("dp2tp2", "did you mean 'dp2xtp2'?"),
        ("DP2*TP2", "did you mean 'dp2xtp2'?"),
        ("ddp", "did you mean 'dp'?"),
        ("fsdp", "did you mean 'zero3'?"),
        ("autoo", "did you mean 'auto'?"),
        ("dp4xfp4", r"did you mean 'dp4xfp8'\?"),
        ("dp2xdp2", "names dp twice"),
        ("dpxtp", "leaves the sizes of dp and tp open"),
        ("dp3", "needs 3 devices, not 4; the nearest is 'dp4'$"),
        ("pp8xdp16xtp2xspxzero1", "needs 256 devices, not 4; the nearest is 'pp2xtp2xsp'$"),
        ("tp3xsp", "needs 3 devices, not 4; the nearest is 'dp2xtp2xsp'$"),
        ("tp3xzero1", "needs a multiple of 3 devices, not 4"),
        ("single", "needs 1 device, not 4; the nearest is 'dp4'$"),
        ("splits2", "needs 1 device, not 4: say how they are used, as in 'dpxsplits2'"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(ValueError, match=message):
        parse_name(name, 4)


def test_tensor_parallelism_is_the_inner_axis():
    assert list(Textbook(2, 4, ep=3).mesh.items()) == [("dp", 2), ("ep", 3), ("tp", 4)]
    assert Textbook().mesh == {"dp": 1}


def test_a_mesh_with_experts():
    assert list(refined({"dp": 8, "tp": 2, "experts": 4}).items()) == [("dp", 4), ("ep", 2), ("tp", 2)]
    assert refined({"x": 2, "y": 4}) == {"x": 2, "y": 4}
    with pytest.raises(ValueError, match="experts are spread over dp x tp; leave out cp"):
        refined({"dp": 2, "cp": 2, "experts": 2})
