"""A program of one's own: it saves where it likes, and goes on from there when it is started again."""

import json
import os

import gcsfs

bucket = gcsfs.GCSFileSystem()
checkpoint = os.environ["RELAY_RUN_DIR"] + "/mine/state.json"
state = json.loads(bucket.cat_file(checkpoint)) if bucket.exists(checkpoint) else {"step": 0, "sum": 0}
while state["step"] < 3_000_000:
    state = {"step": state["step"] + 1, "sum": state["sum"] + state["step"]}
    if state["step"] % 300_000 == 0:
        bucket.pipe_file(checkpoint, json.dumps(state).encode())
        print("saved", state, flush=True)
