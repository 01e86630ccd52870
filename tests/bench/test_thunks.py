"""XLA's list of what a program launches, read."""

import pytest

from jaxserve.bench.thunks import count_launches, parse_thunks, read_thunks

ONE_GRAPH = """\
000: kCommandBuffer      [source | sink]
    001: kCopy         [source       | next=002 (1)] kCopy
    002: kCustomCall   [prev=001 (1) | next=003 (1)] kCustomCall
    003: kDynamicSliceFusion [prev=002 (1) | next=005 (1)] params=5, results=4
        004: kCustomCall [source | sink] kCustomCall
    005: kConditional  [prev=003 (1) | next=011 (1)]
      false_branch:
        006: kConditional  [source | next=009 (1)]
          false_branch:
            007: kCustomKernel [source | sink] sort grid: [1, 1, 1] threads: [32, 1, 1]
          true_branch:
            008: kCopy [source | sink] kCopy
        009: kCustomKernel [prev=006 (1) | sink] loop_add_fusion grid: [1, 1, 1] threads: [32, 1, 1]
      true_branch:
        010: kCopy [source | sink] kCopy
    011: kCustomKernel [prev=005 (1) | sink] argmax grid: [1, 1, 1] threads: [32, 1, 1]
"""
LOOP = """\
001: kCopy         [source       | next=003 (2)] kCopy
003: kWhile        [prev=001 (1) | sink        ]
condition:
    004: kCustomKernel [source | sink] compare grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source | next=007 (1)]
        005: kCustomKernel [source | sink] add grid: [1, 1, 1] threads: [1, 1, 1]
        006: kCustomKernel [source | sink] multiply grid: [1, 1, 1] threads: [1, 1, 1]
    007: kConditional [prev=000 (1) | next=010 (1)]
      false_branch:
        000: kCommandBuffer [source | sink]
            008: kCustomKernel [source | sink] sort grid: [1, 1, 1] threads: [1, 1, 1]
      true_branch:
        009: kCopy [source | sink] kCopy
    010: kCustomKernel [prev=007 (1) | sink] argmax grid: [1, 1, 1] threads: [1, 1, 1]
"""


def test_one_graph_holds_everything():
    launches = count_launches(parse_thunks(ONE_GRAPH))
    assert launches.graphs == 1
    assert not launches.outside
    # Copy, two calls, the argmax; and of the condition a copy, or a copy or sort and an addition.
    assert launches.kernels == (5, 6)


def test_what_is_launched_outside_of_graphs():
    copy, loop = parse_thunks(LOOP)
    assert (copy.kind, list(loop.parts)) == ("kCopy", ["condition", "body"])
    launches = count_launches([copy, loop])
    assert launches.graphs == 2
    expected = {"kCopy": 2, "kWhile": 1, "kCustomKernel": 2, "kConditional": 1}
    assert launches.outside == expected
    body = count_launches(loop.parts["body"])
    assert (body.graphs, body.kernels) == (2, (4, 4))
    assert body.outside == {"kConditional": 1, "kCopy": 1, "kCustomKernel": 1}
    assert [thunk.kernel for thunk in loop.parts["body"]][-1] == "argmax"


def test_a_folder_of_one_program(tmp_path):
    with pytest.raises(FileNotFoundError, match="no list of thunks"):
        read_thunks(tmp_path)
    (tmp_path / "module_1.a.thunk_sequence.txt").write_text(LOOP)
    assert count_launches(read_thunks(tmp_path)).graphs == 2
    (tmp_path / "module_1.a.thunk_sequence_after_thunk_passes.txt").write_text(ONE_GRAPH)
    assert count_launches(read_thunks(tmp_path)).graphs == 1
    (tmp_path / "module_2.b.thunk_sequence.txt").write_text(LOOP)
    with pytest.raises(ValueError, match="2 programs"):
        read_thunks(tmp_path)
