"""Unpacks what `modules` has written, in a process that knows nothing else; prints what differs."""

import json
import pickle
import sys
from pathlib import Path

from sparkdl.serialization.travel.packed_module import unpack

done, study = pickle.loads(Path(sys.argv[1]).read_bytes())
bad = {}
for name, (packed, expected, copied) in done.items():
    found = study(unpack(packed.skeleton, packed.tensors))
    for what, other in {"worker": found, "driver": copied}.items():
        for part in expected:
            if other[part] != expected[part]:
                bad[f"{name} on the {what}: {part}"] = [str(expected[part]), str(other[part])]
print(json.dumps({"names": list(done), "bad": bad}))
