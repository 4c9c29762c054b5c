"""A session holds no more device memory than its limit allows: CUDA itself included."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from imp_runtime.placement import vram_in_use

GIB = 1 << 30
# A process of its own, to count CUDA's own memory too.
SCRIPT = """
import json, sys
import numpy as np
from imp_runtime.model import Model
from imp_runtime.placement import Limits, vram_in_use
from imp_runtime.session import Session

limits = Limits(vram_bytes=int(sys.argv[1]), expert_policy=sys.argv[2])
model = Model.synthetic("flash-next:layers=8", device="cuda", limits=limits, routing="prose")
with Session(model, n_ctx=4096, max_seqs=4) as session:
    tokens = np.random.RandomState(1).randint(0, model.vocab_size, 512)
    seqs = [session.open() for _ in range(4)]
    for seq in seqs:
        seq.extend(tokens, outputs="none")
    for n in (1, 2, 3, 4):
        for _ in range(4):
            session.core.step([(s.id, np.array([7], np.int32), 0) for s in seqs[:n]])
    plan = session.plan
    print(json.dumps({
        "in_use": vram_in_use(), "planned": plan.vram_bytes, "slots": plan.slots,
        "held": session.expert_stats()["slots"], "tier": plan.tier.name,
    }))
"""


@pytest.mark.parametrize("policy", ["lru", "lrfu"])
def test_no_more_than_the_limit(cuda: None, policy: str) -> None:
    limit = 7 * GIB
    others = vram_in_use()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(limit), policy], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["tier"] == "PINNED" and got["slots"] == got["held"]
    assert limit - GIB < got["in_use"] - others <= limit, (got, others)
