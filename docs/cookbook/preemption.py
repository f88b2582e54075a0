"""Ask a cloud whether this machine is about to be taken away, and stop in time.

`fk.StopSignal(also=notice)` asks about once a second in a thread: an endpoint that is slow or away
costs no step, and a warning, once. Each time-out is short because it is asked again.
"""

import json
import threading
import urllib.error
import urllib.request
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from tensordict import TensorDict

import forgekit as fk

LINK_LOCAL = "http://169.254.169.254"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # metadata has no proxy


def read(url, method="GET", **headers):
    """The text behind a URL; None where there is none (404)."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        request = urllib.request.Request(url, headers=named, method=method)
        with DIRECT.open(request, timeout=2) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def google(host="http://metadata.google.internal"):
    """Compute Engine: 30 s ahead, for spot machines."""
    said = read(f"{host}/computeMetadata/v1/instance/preempted", Metadata_Flavor="Google")
    return "preempted by Google" if said == "TRUE" else None


def amazon(host=LINK_LOCAL):
    """EC2: two minutes ahead; no notice is a 404."""
    lifetime = {"X_aws_ec2_metadata_token_ttl_seconds": "60"}
    token = read(f"{host}/latest/api/token", "PUT", **lifetime)
    notice = f"{host}/latest/meta-data/spot/instance-action"
    said = read(notice, X_aws_ec2_metadata_token=token or "")
    return (
        f"Amazon will {json.loads(said)['action']} at {json.loads(said)['time']}" if said else None
    )


def azure(host=LINK_LOCAL):
    """Azure: at least 30 s ahead."""
    said = read(f"{host}/metadata/scheduledevents?api-version=2020-07-01", Metadata="true")
    events = json.loads(said or "{}").get("Events", [])
    return "preempted by Azure" if any(e["EventType"] == "Preempt" for e in events) else None


# A metadata service that takes each machine away at the second question.


class Service(BaseHTTPRequestHandler):
    asked = 0

    def answer(self):
        Service.asked += "token" not in self.path
        is_due = Service.asked > 1
        events = [{"EventType": "Preempt"}] if is_due else [{"EventType": "Freeze"}]
        path = self.path.partition("?")[0]
        missing = path.endswith("instance-action") and not is_due
        text = {
            "/computeMetadata/v1/instance/preempted": "TRUE" if is_due else "FALSE",
            "/latest/api/token": "secret",
            "/latest/meta-data/spot/instance-action": '{"action": "terminate", "time": "12:02"}',
            "/metadata/scheduledevents": json.dumps({"Events": events}),
        }[path]
        needed = {"/c": "Metadata-Flavor", "/m": "Metadata"}.get(path[:2])
        if path.startswith("/latest/meta"):
            needed = "X-aws-ec2-metadata-token"
        self.send_response(404 if missing else 403 if needed and not self.headers[needed] else 200)
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_PUT = answer

    def log_message(self, *_):
        pass


def loss_fn(model, batch):
    return fk.Loss(model(batch["x"]).square().sum(), len(batch["x"]))


server = ThreadingHTTPServer(("localhost", 0), Service)
threading.Thread(target=server.serve_forever, daemon=True).start()
host = f"http://localhost:{server.server_port}"
batch = TensorDict(x=torch.ones(4, 2), batch_size=[4])
for cloud in (google, amazon, azure):
    Service.asked = 0
    model = torch.nn.Linear(2, 2)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()))
    with fk.StopSignal(also=partial(cloud, host)) as stop:
        step = fk.make_step(loss_fn, schedule=fk.optim.constant(1e-3), stop=stop)
        while not stop.requested:
            state, metrics = step(state, [batch])
    print(f"{cloud.__name__}: {stop.reason}; asked {Service.asked} times", state.step > 3)
server.shutdown()
server.server_close()
