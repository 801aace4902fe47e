"""A small service that speaks Tinker's protocol (SDK 0.38): one base model, LoRA, AdamW, states kept in memory.

Every request is worked off when it comes, under one lock; its future is there when it is asked for. The sampler's
weights may be rounded, so that sampler and learner differ as a real service's do. `faults` spoils requests to come.
"""

import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from tinker.proto import tinker_public_pb2 as pb

from evaluation.generation import row_seed, sample
from training.arms import Mismatch
from training.cell import Cell
from training.lora import adapt
from training.mismatch import SamplerCopy
from training.run import load_model

NUMPY = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}


class Run:
    """One model in training."""

    def __init__(self, model_path: str, cell: Cell) -> None:
        base, self.tokenizer = load_model(model_path, None)
        self.model = adapt(base, cell)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters)
        self.gradients: list[dict[str, torch.Tensor]] = []
        """One a step, before clipping."""

    def adapters(self) -> dict[str, torch.Tensor]:
        return {k: v.clone() for k, v in get_peft_model_state_dict(self.model, save_embedding_layers=False).items()}

    def state(self) -> dict[str, Any]:
        moments = {i: {k: v.clone() for k, v in m.items()} for i, m in self.optimizer.state_dict()["state"].items()}
        return {"adapters": self.adapters(), "moments": moments}

    def load(self, state: dict[str, Any]) -> None:
        set_peft_model_state_dict(self.model, state["adapters"])
        groups = self.optimizer.state_dict()["param_groups"]
        moments = {i: {k: v.clone() for k, v in m.items()} for i, m in state["moments"].items()}
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})


class TinkerServer:
    """Serves `cell`'s model from the folder `model_path`; use as a context manager."""

    def __init__(self, model_path: Path, cell: Cell, name: str, rounding: Any = "int8") -> None:
        self.model_path, self.cell, self.name, self.rounding = str(model_path), cell, name, rounding
        self.runs: dict[str, Run] = {}
        self.samplers: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        self.exports: dict[str, dict[str, torch.Tensor]] = {}
        self.results: dict[str, Any] = {}
        self.requests: list[str] = []
        self.ends: dict[str, str] = {}
        """How sessions were ended."""
        self.adams: list[dict[str, Any]] = []
        """What each optimizer step was asked for."""
        self.faults: list[tuple[str, Any]] = []
        """(end of the path, what to do once: an HTTP status, seconds to wait, or "half" of a file)."""
        self.top_k = True
        self.lock = threading.RLock()
        self.files: dict[str, bytes] = {}

    def __enter__(self) -> "TinkerServer":
        handler = type("Handler", (_Handler,), {"service": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def answer(self, path: str, body: bytes) -> Any:
        """Return what a POST is answered with."""
        self.requests.append(path)
        kind = path.removeprefix("/api/v1/")
        if kind == "forward_backward":
            message = pb.ForwardBackwardRequest()
            message.ParseFromString(body)
            return self.promise(lambda: self.forward_backward(message))
        data = json.loads(body or b"{}")
        simple: dict[str, Any] = {
            "client/config": {"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False},
            "client/dynamic_config": {},
            "session_heartbeat": {"type": "session_heartbeat"},
            "telemetry": {"status": "accepted"},
        }
        if kind in simple:
            return simple[kind]
        if kind == "create_session":
            return {"type": "create_session", "session_id": uuid.uuid4().hex}
        if kind.endswith("/finish"):
            self.ends[kind.split("/")[1]] = data["reason"]["type"]
            return {}
        if kind == "retrieve_future":
            return self.results.get(data["request_id"], {"error": "unknown request", "category": "user"})
        if kind == "get_info":
            told = {"model_name": self.name, "tokenizer_id": self.model_path}
            return {"type": "get_info", "model_id": data["model_id"], "model_data": told, "is_lora": True}
        if kind == "asample":
            ids = [f"{data['sampling_session_id']}-{data['seq_id']}-{i}" for i in range(data["num_samples"])]
            return self.promise(lambda: self.sample(data)) | {"sample_sequence_ids": ids}
        return self.promise(lambda: getattr(self, kind)(data))

    def promise(self, work: Callable[[], Any]) -> dict[str, str]:
        """Do the work and keep its result, or its failure, for whoever asks."""
        request = uuid.uuid4().hex
        with self.lock:
            try:
                self.results[request] = work()
            except KeyError as e:
                self.results[request] = {"error": f"unknown {e}", "category": "user"}
        return {"request_id": request}

    def create_model(self, data: dict[str, Any]) -> Any:
        if data["base_model"] != self.name:
            raise KeyError(data["base_model"])
        assert not data["lora_config"]["train_unembed"]  # as local cells
        model_id = f"{data['session_id']}:train:{data['model_seq_id']}"
        self.runs[model_id] = Run(self.model_path, self.cell.replace(lora_rank=data["lora_config"]["rank"]))
        return {"type": "create_model", "model_id": model_id}

    def load_weights(self, data: dict[str, Any]) -> Any:
        state = self.states[data["path"]]
        model_id = f"{data['session_id']}:train:{data['model_seq_id']}"
        run = self.runs[model_id] = Run(self.model_path, self.cell)
        run.load(state)
        return {"type": "load_weights", "model_id": model_id, "path": data["path"]}

    def save_weights(self, data: dict[str, Any]) -> Any:
        path = f"tinker://{data['model_id']}/weights/{data['path']}"
        self.states[path] = self.runs[data["model_id"]].state()
        return {"type": "save_weights", "path": path}

    def save_weights_for_sampler(self, data: dict[str, Any]) -> Any:
        run, session = self.runs[data["model_id"]], uuid.uuid4().hex
        copy = SamplerCopy(Mismatch(rounding=self.rounding), run.model)
        self.samplers[session] = (copy.at(0, run.model), run.tokenizer)
        return {"type": "save_weights_for_sampler", "sampling_session_id": session}

    def save_weights_external(self, data: dict[str, Any]) -> Any:
        run = self.runs[data["model_id"]]
        folder = Path(self.scratch) / uuid.uuid4().hex
        run.model.save_pretrained(folder, save_embedding_layers=False)
        self.exports[data["path"]] = run.adapters()
        self.files |= {f"{data['path']}/{p.name}": p.read_bytes() for p in folder.iterdir() if p.suffix != ".md"}
        return {
            "type": "save_weights_external",
            "path": f"tinker://{data['model_id']}/external_weights/{data['path']}",
        }

    scratch = "/tmp"
    """Where peft writes what is served from memory."""

    def urls(self, name: str) -> Any:
        files = {f.partition("/")[2]: f"{self.url}/files/{f}" for f in self.files if f.startswith(name + "/")}
        return {"urls": files, "expires": "2100-01-01T00:00:00Z"}

    def optim_step(self, data: dict[str, Any]) -> Any:
        run, adam = self.runs[data["model_id"]], data.get("optim_params") or data["adam_params"]
        self.adams.append(adam)
        for group in run.optimizer.param_groups:
            group |= {"lr": adam["learning_rate"], "betas": (adam["beta1"], adam["beta2"])}
            group |= {"eps": adam["eps"], "weight_decay": adam["weight_decay"]}
        named = [(n, p) for n, p in run.model.named_parameters() if p.requires_grad]
        run.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        norm = torch.nn.utils.clip_grad_norm_(run.parameters, adam["grad_clip_norm"] or float("inf"))
        run.optimizer.step()
        run.optimizer.zero_grad()
        return {"metrics": {"grad_norm": float(norm)}}

    def sample(self, data: dict[str, Any]) -> bytes:
        model, tokenizer = self.samplers[data["sampling_session_id"]]
        how = data["sampling_params"]
        prompt = [t for chunk in data["prompt"]["chunks"] for t in chunk["tokens"]]
        k = data.get("topk_sample_logprobs", 0) if self.top_k else 0
        [drawn] = sample(
            model,
            [prompt],
            [[row_seed(how["seed"], "tinker", "", i) for i in range(data["num_samples"])]],
            max_new_tokens=how["max_tokens"],
            temperature=how["temperature"],
            top_p=how["top_p"],
            stop_ids=how["stop"],
            pad_id=tokenizer.pad_token_id,
            top_k=k,
        )
        answer = pb.SampleResponse()
        for c in drawn:
            sequence = answer.sequences.add(
                stop_reason=pb.STOP_REASON_STOP if c.finish_reason == "stop" else pb.STOP_REASON_LENGTH,
                tokens=np.array(c.token_ids, np.int32).tobytes(),
                logprobs=np.array(c.logprobs, np.float32).tobytes(),
            )
            if c.head is not None:
                head = {"token_ids": c.head.ids.tobytes(), "logprobs": c.head.logprobs.tobytes()}
                sequence.topk_sampled_logprobs.CopyFrom(pb.TopkLogprobs(length=len(c.token_ids), k=k, **head))
        return answer.SerializeToString()

    def forward_backward(self, message: Any) -> bytes:
        """Cross entropy with given weights, the sum over all targets; gradients add up until the optimizer's step."""
        run, total = self.runs[message.model_id], 0.0
        assert message.loss_fn == "cross_entropy"
        answer = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        for datum in message.data:
            ids = np.concatenate([np.frombuffer(c.encoded_text.tokens, np.int32) for c in datum.model_input])
            targets, weights = (tensor(datum.loss_fn_inputs[k]) for k in ("target_tokens", "weights"))
            with torch.set_grad_enabled(not message.forward_only):
                logits = run.model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
                wide = targets if targets.ndim == 2 else targets[:, None]
                logprobs = logits.log_softmax(-1).gather(-1, wide).view(targets.shape)
                loss = -(logprobs * weights).sum()
                if not message.forward_only:
                    loss.backward()
            total += loss.item()
            values = logprobs.detach().numpy()
            record = answer.loss_fn_outputs.add(num_datums=1)
            offsets = np.array([0, values.nbytes], np.int64).tobytes()
            record.fields["logprobs"].CopyFrom(
                pb.BatchedTensor(
                    data=values.tobytes(), offsets=offsets, dtype=pb.DTYPE_FLOAT32, trailing_shape=values.shape[1:]
                )
            )
        answer.metrics["loss:sum"] = total
        return answer.SerializeToString()


def tensor(message: Any) -> torch.Tensor:
    """Decode a tensor: dense, or by rows with most entries zero, as the SDK sends gradients."""
    kind, shape = NUMPY[message.dtype], tuple(message.shape)
    if message.WhichOneof("encoding") != "sparse_csr":
        dense = torch.from_numpy(np.frombuffer(message.dense, kind).copy())
        return dense.view(shape) if shape else dense
    part, out = message.sparse_csr, torch.zeros(shape, dtype=torch.from_numpy(np.zeros(0, kind)).dtype)
    rows, columns = (np.frombuffer(x, np.int64) for x in (part.crow_indices, part.col_indices))
    values = np.frombuffer(part.values, kind)
    for row, (start, end) in enumerate(itertools.pairwise(rows)):
        out[row, torch.from_numpy(columns[start:end].copy())] = torch.from_numpy(values[start:end].copy())
    return out


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: TinkerServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self._spoilt():
            return
        self._send(200, self.service.answer(self.path, body))

    def do_GET(self) -> None:
        if self._spoilt():
            return
        if self.path.startswith("/files/"):
            self._send(200, self.service.files[self.path.removeprefix("/files/")])
        elif self.path.endswith("/external_weights_urls"):
            self._send(200, self.service.urls(self.path.split("/")[-2]))
        elif "/samplers/" in self.path:
            self._send(200, {"sampler_id": self.path.rsplit("/", 1)[1], "base_model": self.service.name})
        else:
            self._send(200, {"status": "ok"})

    def _spoilt(self) -> bool:
        fault = next((f for f in self.service.faults if self.path.endswith(f[0])), None)
        if fault is None:
            return False
        if fault[1] != "always 401":
            self.service.faults.remove(fault)
        if fault[1] == "half":
            content = self.service.files[self.path.removeprefix("/files/")]
            self._send(200, content, len(content) // 2)
            return True
        if isinstance(fault[1], float):
            time.sleep(fault[1])
            return False
        self._send(401 if fault[1] == "always 401" else fault[1], {"detail": "spoilt by the test"})
        return True

    def _send(self, status: int, content: Any, sent: int | None = None) -> None:
        """Answer; `sent` bytes of it, then nothing."""
        raw = isinstance(content, bytes)
        data = content if raw else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf" if raw else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:sent])
        self.close_connection = self.close_connection or sent not in (None, len(data))

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
