"""make_folder: whole or absent, under kills, failures and company."""

import signal
import subprocess
import sys
import textwrap

import pytest

from jaxserve.model.folders import make_folder

MAKER = """
    import sys, time
    from pathlib import Path
    from jaxserve.model.folders import make_folder

    target, log = Path(sys.argv[1]), Path(sys.argv[2])

    def fill(folder):
        (folder / "first").write_text("half")
        with log.open("a") as file:
            file.write("filling\\n")
        print("filling", flush=True)
        time.sleep(float(sys.argv[3]))
        (folder / "second").write_text("whole")

    make_folder(target, fill)
    assert sorted(path.name for path in target.iterdir()) == ["first", "second"]
"""


def start_maker(target, log, seconds):
    arguments = [str(target), str(log), str(seconds)]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(MAKER), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fill_whole(folder):
    (folder / "first").write_text("whole")


def test_a_killed_maker_leaves_no_target_and_the_next_one_cleans_up(tmp_path):
    target = tmp_path / "cache" / "model"
    with start_maker(target, tmp_path / "log", 60) as maker:
        assert maker.stdout.readline() == "filling\n"
        maker.send_signal(signal.SIGKILL)
    assert not target.exists()
    # A maker of another folder in the same place removes what the killed one left.
    make_folder(target.with_name("other"), fill_whole)
    assert [path.name for path in target.parent.iterdir()] == ["other"]
    make_folder(target, fill_whole)
    assert [path.name for path in target.iterdir()] == ["first"]


def test_of_many_makers_one_fills_and_all_find_it_whole(tmp_path):
    target, log = tmp_path / "cache" / "model", tmp_path / "log"
    makers = [start_maker(target, log, 2) for _ in range(3)]
    for maker in makers:
        _, errors = maker.communicate(timeout=60)
        assert maker.returncode == 0, errors
    assert log.read_text() == "filling\n"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_failing_maker_leaves_nothing(tmp_path):
    def fill(folder):
        fill_whole(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_folder(tmp_path / "cache" / "model", fill)
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_existing_folder_is_returned_untouched(tmp_path):
    def fill(folder):
        raise AssertionError

    (tmp_path / "model").mkdir()
    assert make_folder(tmp_path / "model", fill) == tmp_path / "model"
