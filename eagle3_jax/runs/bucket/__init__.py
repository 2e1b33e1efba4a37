"""Cloud Storage by address (`gs://bucket/path`): paths, whole objects, ranges of them, leases and logs.

Each of three clients has one strength: `etils.epath` gives paths, which Orbax takes too; google-cloud-storage writes an
object under a generation precondition; TensorStore reads ranges from many threads at once.
"""
