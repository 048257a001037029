"""Lanes: many calls over one long-lived stream to each replica. The protocol is in proto/pierhead/lane/v1/lane.proto.

window.py   flow control of one stream of messages (pure)
outbox.py   the queue of frames to send, one packet per turn of the event loop
packet_socket.py   packets over a Unix socket; else they are messages of a gRPC stream
client.py   the caller's connection        lane_calls.py   its calls
server.py   the replica's side             served.py       its calls
"""
