"""/metrics, read by prometheus-client's parser."""

import urllib.request

from harness import FIGURES, URL, run
from prometheus_client.parser import text_string_to_metric_families


def check_metrics():
    with urllib.request.urlopen(f"{URL}/metrics", timeout=30) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    FIGURES["families"] = len(families)
    assert len(families) > 20
    for family in families:
        assert family.name.startswith("jaxserve:")
        assert family.type in ("counter", "gauge", "histogram"), family
        assert family.samples, family


run(globals(), "prometheus-client")
