"""Where a browser finds a run's files."""

from tpu.runs.links import file_links


def test_the_files_of_a_run_are_found_in_googles_console_and_on_a_local_server():
    run = "gs://my-runs/runs/icl-3"
    assert file_links(run, None)["checkpoints"] == (
        "https://console.cloud.google.com/storage/browser/my-runs/runs/icl-3/checkpoints"
    )
    assert file_links(run, "http://127.0.0.1:9/")["logs"] == (
        "http://127.0.0.1:9/storage/v1/b/my-runs/o?prefix=runs%2Ficl-3%2Flogs%2F"
    )
