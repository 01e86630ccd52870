"""langchain-tests' standard suite on ChatOpenAI: see langchain_standard.py."""

import os
import sys
import xml.etree.ElementTree as ElementTree

from harness import FIGURES, FOLDER, HERE, URL, command, run


def check_standard_tests():
    report = FOLDER / "report.xml"
    try:
        command(
            "python",
            "-m", "pytest", str(HERE / "langchain_standard.py"), "-q", "--asyncio-mode=auto",
            "-o", "asyncio_default_test_loop_scope=session", "-p", "no:cacheprovider",
            "--benchmark-disable", f"--junit-xml={report}",
            "--rootdir", str(HERE), "-c", os.devnull, "--noconftest",
            timeout_s=1800, env=os.environ | {"JAXSERVE_URL": URL},
        )  # fmt: skip
    finally:
        (suite,) = ElementTree.parse(report).getroot()
        counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
        FIGURES["skipped"] = counts["skipped"]
        FIGURES["passed"] = 2 * counts["tests"] - sum(counts.values())
        print(counts, file=sys.stderr)


run(globals(), "langchain-openai")
