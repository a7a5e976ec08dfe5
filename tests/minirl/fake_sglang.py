"""A server on 127.0.0.1 that speaks as SGLang does, and fails as it is told."""

import json
import threading

from tests.http_server import Server

STOP = 1


class Fake:
    """Writes the ids of `reply`; log-probabilities are -1 / id.

    Attributes:
        faults: What the next answers of an endpoint are, in place of the right ones: a status,
            bytes, a function of the right answer, `hang` until told otherwise, or `drop`.
        down: Endless faults: every answer is dropped.
        held: Called with a request before it is answered; it may wait.
        ports: Of clients, of all requests.
        hanging: Names of the requests that hung.
        aborted: Names of those that were taken back.
        starts: How often it was started anew, as a child of a run is.
    """

    def __init__(self, *, reply=(10, 11, STOP)):
        self.reply = list(reply)
        self.weights, self.folder = "default", ""
        self.faults, self.bodies = {}, []
        self.hanging, self.aborted = [], []
        self.ports: list[int] = []
        self.held = lambda body: None
        self.down, self.paused, self.hung = False, False, threading.Event()
        self.adapters: dict[str, str] = {}
        self.order: list[str] = []
        self.starts = 0
        self._server = Server(self.answer)
        self.url = self._server.url

    def close(self):
        self.hung.set()
        self._server.close()

    @property
    def is_running(self):
        return not self.down

    def start(self):
        """Come back as a process that knows nothing of the last one's weights."""
        self.starts += 1
        self.down, self.weights = False, "default"
        self.adapters.clear()

    def answer(self, handler, body):
        path = handler.path
        self.ports.append(handler.client_address[1])
        faults = self.faults.get(path)
        fault = faults.pop(0) if faults else None
        if self.down or fault == "drop":
            return None
        if fault == "hang":
            self.hanging.append((body or {}).get("rid"))
            self.hung.wait(30)
            return None
        status, right = (fault, {}) if isinstance(fault, int) else self.right(path, body)
        if self.down:  # since the request came
            return None
        right = fault(right) if callable(fault) else right
        return status, {}, fault if isinstance(fault, bytes) else json.dumps(right).encode()

    def right(self, path, body):
        self.order.append(path)
        told = {
            "/model_info": {"weight_version": self.weights},
            "/server_info": {"version": "0.5.23"},
            "/v1/models": {"data": [{"max_model_len": 4096}]},
        }
        act = getattr(self, f"on_{path[1:]}", lambda _: (200, told.get(path, {})))
        return act(body)

    def on_health(self, _):
        return (503 if self.paused else 200), {}

    def on_pause_generation(self, _, paused=True):
        self.paused = paused
        return 200, {}

    def on_continue_generation(self, _):
        return self.on_pause_generation(_, paused=False)

    def on_abort_request(self, body):
        self.aborted.append(body["rid"])
        return 200, {}

    def on_update_weights_from_disk(self, body):
        self.folder, self.weights = body["model_path"], body["weight_version"]
        return 200, {"success": True}

    def on_load_lora_adapter(self, body):
        if body["lora_name"] in self.adapters:
            return 400, {"success": False, "error_message": "LoRA with this name already exists"}
        self.adapters[body["lora_name"]] = body["lora_path"]
        return 200, {"success": True}

    def on_unload_lora_adapter(self, body):
        return (200 if self.adapters.pop(body["lora_name"], None) else 400), {}

    def on_generate(self, body):
        if self.paused:
            return 503, {"error": "paused"}  # a real one would let us wait
        if body.get("lora_path") not in (None, *self.adapters):
            return 400, {"error": f"LoRA adapters are not loaded: {body['lora_path']}"}
        self.bodies.append(body)
        sent, settings = body["input_ids"], body["sampling_params"]
        began = self.weights
        self.held(body)
        meta = {
            "id": body.get("rid"),
            "prompt_tokens": len(sent),
            "cached_tokens": len(sent) // 2,
            "weight_version": self.weights,
            "finish_reason": {"type": "stop", "matched": self.reply[-1]},
        }
        ids = self.reply[: settings["max_new_tokens"]]
        # The first token is as old as the request, the others are not.
        meta["weight_versions"] = [
            {"version": began, "start": 0, "end": 1},
            {"version": self.weights, "start": 1, "end": len(ids)},
        ]
        meta["output_token_logprobs"] = [[-1 / i, i, None] for i in ids]
        return 200, {"output_ids": ids, "meta_info": meta}
