"""`triton.client()`: calls to NVIDIA's Triton Inference Server through a handle, with NumPy arrays.

    from pierhead import triton

    models = triton.client("triton")
    reply = await models.infer("add", {"a": a, "b": b})     # {"sum": array}
    async for part in models.stream("repeat", {"values": values}):
        ...

Needs the extra `triton` (`pip install pierhead[triton]`): the messages, the stub and the dtypes are tritonclient's. The
channel is a handle's, so the choice of the replica, retries before work, deadlines, cancellation and metrics are those
of every handle.

inference.py       the client                      messages.py        arrays in its messages
errors.py          what its errors mean            models.py          models that are loaded on demand
connection.py      the connection to one server    large_request.py   tensors, in messages or in memory
regions.py         memory that the server has      registrations.py   until the server has let go of it
system_regions.py  system shared memory            cuda.py            inputs in GPU memory
owner.py           whose a region is
"""

from pierhead.triton.inference import Client, client

__all__ = ["Client", "client"]
