"""schemathesis: requests made from /openapi.json, and answers held against it."""

from harness import HERE, URL, command, run


def check_openapi_document():
    command(
        "schemathesis",
        "--no-color", "--config-file", str(HERE / "schemathesis.toml"),
        "run", f"{URL}/openapi.json", "--checks", "all", "--phases", "examples,coverage,fuzzing",
        "--max-examples", "20", "--seed", "1", "--suppress-health-check", "all",
        "--continue-on-failure", "--request-timeout", "60", "--output-sanitize", "false",
        timeout_s=1800, cwd=HERE,
    )  # fmt: skip


run(globals(), "schemathesis")
