"""What the bridge costs: recording alone, serving with and without records, each transport, and the pause of a swap.

    python benchmarks/sglang_bridge.py --run outputs/sglang --python .venv-sglang/bin/python

Servers with and without the plugin's log stand side by side and answer the same greedy requests of fixed length in turn; they are
compared in the CPU time of all their processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import torch
from transformers import AutoTokenizer

from datamodules.chat import render_prompt
from pipeline.bootstrap import bootstrap_ratio
from serving_bridge.records import Round, Sampling, VerificationRecord
from serving_bridge.sglang_http import ServerAddress, SGLangClient
from serving_bridge.sglang_launch import Launch
from serving_bridge.sglang_plugin.recorder import Recorder
from serving_bridge.sglang_plugin.rounds import capture
from serving_bridge.sglang_plugin.settings import LengthSettings, PluginSettings
from serving_bridge.sglang_process import ServerProcess, running_server
from serving_bridge.sglang_server import SGLangServer
from serving_bridge.transports import open_reader, open_writer

PORT = 31873


def make_launch(args: argparse.Namespace, work: Path, log: str, port: int = PORT) -> Launch:
    """A server of the run's target and offline drafter."""
    return Launch(
        python=str(Path(args.python).absolute()),
        model=str((args.run / "target").absolute()),
        drafter=(args.run / "length_head" / "drafter").absolute(),
        settings=PluginSettings(log=log, swap_root=str(work / "drafters"), length=LengthSettings(gamma=1.3)),
        preset="cpu",
        algorithm="DFLASH",
        port=port,
        context_length=640,
        extra=("--disable-radix-cache",),
    )


def cpu_seconds(server: ServerProcess) -> float:
    """Of the server and everything it started."""
    root = psutil.Process(server.process.pid)
    return sum(sum(p.cpu_times()[:2]) for p in [root, *root.children(recursive=True)])


def unseen_prompts(target: Path) -> list[list[int]]:
    """Prompts in token ids that the drafter was not trained on: it accepts far more on those that it was."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows = Path(__file__).parents[1] / "configs" / "quickstart_prompts" / "heldout.jsonl"
    return [render_prompt(tokenizer, json.loads(line)["messages"]) for line in rows.open()]


def logging_cost(args: argparse.Namespace, work: Path) -> None:
    """Two servers side by side, one of which logs, answer every request in turn, the order turned over each time.

    Whole runs one after the other differ by ten percent on a machine that is not one's own; a request and its twin do not.
    """
    prompts = unseen_prompts(args.run / "target")
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                running_server(make_launch(args, work / name, log, port), work / f"{name}.log")
            )
            for name, log, port in (("without", "", PORT), ("with", str(work / "spool"), PORT + 1))
        ]
        clients = [SGLangClient(ServerAddress(server.url), 120.0) for server in servers]

        def ask(number: int, prompt: list[int]) -> tuple[float, list[int]]:
            """(CPU seconds, tokens) of one request."""
            sampling = {"temperature": 0, "max_new_tokens": args.tokens, "ignore_eos": True}
            before = cpu_seconds(servers[number])
            output = clients[number].generate({"input_ids": prompt, "sampling_params": sampling})[
                "output_ids"
            ]
            return cpu_seconds(servers[number]) - before, output

        for number in (0, 1, 0, 1):
            ask(number, prompts[0])
        spent: list[tuple[float, float]] = []
        for index in range(args.requests):
            prompt = prompts[1 + index % (len(prompts) - 1)]
            order = (0, 1) if index % 2 else (1, 0)
            pair = {number: ask(number, prompt) for number in order}
            assert pair[0][1] == pair[1][1], "both must have done the same work"
            spent.append((pair[0][0], pair[1][0]))
    without, with_log = (statistics.fmean(column) for column in zip(*spent, strict=True))
    interval = bootstrap_ratio([b for _, b in spent], [a for a, _ in spent], confidence=0.95)
    print(
        f"CPU time with the log / without, {len(spent)} pairs of requests of {args.tokens} tokens: {interval.point:.4f} "
        f"[{interval.low:.4f}, {interval.high:.4f}]; median of pairs "
        f"{statistics.median(b / a for a, b in spent):.4f}; {without:.3f} CPU-s without, {with_log:.3f} with"
    )


def hook_time(args: argparse.Namespace) -> None:
    """What making records takes of the scheduler's thread, without a server: 64 requests, blocks of 16, 8 verified."""
    requests, block, rounds = 64, 16, 80
    settings = PluginSettings(log="unused", target_id="t")
    writer = CountingLog()
    recorder = Recorder(writer, settings, target_id="t", block_size=block, length_policy="adaflash")
    candidates_RB = torch.randint(0, 150_000, (requests, block))
    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=0)
    prompt, output = [50_000] * 200, [50_000] * 5 * rounds
    cpu = time.process_time()
    for _ in range(args.repeats):
        logs = [recorder.begin(f"r{n}", None) for n in range(requests)]
        for number in range(rounds):
            captured = capture(
                drafter_version="v1",
                candidates_RB=candidates_RB,
                verify_lens=[8] * requests,
                logits=None,
                top_k=0,
            )
            for n, log in enumerate(logs):
                recorder.round(
                    log,
                    start=200 + 5 * number,
                    drafter_version=captured.drafter_version,
                    verify_len=captured.verify_len(n),
                    accepted=4,
                    draft_ids=captured.draft_ids(n),
                    target_top_k=captured.target_top_k(n),
                )
        for n, log in enumerate(logs):
            recorder.finish(
                log,
                request_id=f"r{n}",
                prompt_ids=prompt,
                output_ids=output,
                sampling=greedy,
                finish_reason="length",
            )
    spent = time.process_time() - cpu
    count = args.repeats * requests
    assert writer.written == count
    print(
        f"recording: {spent / count / rounds * 1e6:.2f} µs of the scheduler's thread per request and round "
        f"({spent / count * 1e6:.0f} µs per request of {rounds} rounds), {requests} requests at once"
    )


class CountingLog:
    """A log that only counts: writing has a thread of its own and is measured with the transports."""

    def __init__(self) -> None:
        self.written = self.dropped = 0

    def write(self, record: VerificationRecord) -> bool:
        self.written += 1
        return True

    def close(self) -> None:
        pass


def swap_pause(args: argparse.Namespace, work: Path) -> None:
    """The offline and the first trained drafter take turns."""
    launch = make_launch(args, work, "")
    drafters = [args.run / "train" / "drafter", args.run / "length_head" / "drafter"]
    megabytes = (drafters[0] / "model.safetensors").stat().st_size / 1e6
    with running_server(launch, work / "server.log") as server:
        client = SGLangClient(ServerAddress(server.url), 120.0)
        swapper = SGLangServer(client, drafter_root=work / "drafters")
        pauses = [swapper.swap(drafters[n % 2]).pause_ms for n in range(args.swaps)]
    median = statistics.median(pauses)
    print(
        f"swap of {megabytes:.0f} MB: pause {median:.1f} ms (median of {args.swaps}), "
        f"{median / megabytes * 100:.1f} ms per 100 MB"
    )


def sample_record(number: int) -> VerificationRecord:
    """About what a chat answer leaves: 200 prompt and 400 output tokens, blocks of 16, 5 tokens a round."""
    rounds = [
        Round(start=200 + 5 * i, drafter_version="v1", verify_len=8, accepted=4, draft_ids=[50_000] * 15)
        for i in range(79)
    ]
    return VerificationRecord(
        request_id=f"r{number}",
        conversation_key=f"c{number}",
        time=0.0,
        target_id="t",
        sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0),
        prompt_ids=[50_000] * 200,
        output_ids=[50_000] * 400,
        rounds=rounds,
        finish_reason="length",
        block_size=16,
    )


def transport_speed(name: str, place: str, count: int) -> None:
    """Records a second of CPU and of time, written and read."""
    records = [sample_record(n) for n in range(count)]
    size = len(msgspec.json.encode(records[0]))
    writer = open_writer(place, capacity=count)
    writing = timed(lambda: ([writer.write(r) for r in records], writer.flush(120.0)))
    writer.close()
    reader = open_reader(place, "benchmark")
    got = 0

    def read_all() -> None:
        nonlocal got
        while deliveries := reader.read(256):
            got += len(deliveries)

    reading = timed(read_all)
    assert got == count, f"{got} of {count}"
    for what, (wall, cpu) in (("written", writing), ("read", reading)):
        print(
            f"{name}: {count / wall:.0f} records/s {what}, {cpu / count * 1e6:.0f} µs CPU each, {size} bytes"
        )


def timed(work: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


@contextlib.contextmanager
def redis_server(directory: Path) -> Iterator[str | None]:
    """A server on the loopback, if there is one to start."""
    binary = shutil.which("redis-server")
    if binary is None:
        yield None
        return
    command = [
        binary,
        "--port",
        "31874",
        "--bind",
        "127.0.0.1",
        "--dir",
        str(directory),
        "--appendonly",
        "yes",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)
        yield "redis://127.0.0.1:31874/0?stream=records"
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=["hooks", "transports", "swap", "logging"])
    parser.add_argument(
        "--run", type=Path, default=Path("outputs/sglang"), help="Output of `make demo-sglang`."
    )
    parser.add_argument("--python", default=".venv-sglang/bin/python", help="Interpreter that has SGLang.")
    parser.add_argument("--requests", type=int, default=60, help="Pairs of requests in `logging`.")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--swaps", type=int, default=11)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--records", type=int, default=3000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if "hooks" in args.what:
            hook_time(args)
        if "transports" in args.what:
            transport_speed("spool", str(work / "spool"), args.records)
            with redis_server(work) as address:
                if address is not None:
                    transport_speed("redis", address, args.records)
        if "swap" in args.what:
            swap_pause(args, work)
        if "logging" in args.what:
            logging_cost(args, work)


if __name__ == "__main__":
    main()
