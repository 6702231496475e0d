"""One HTTP/2 session between a gateway and an agent, without I/O: bytes in, events out.

core     `Core`, the connection: what the two ends of a session are built on
lanes    one lane's two halves: reassembly with what is held, and the send queues with credit
unary    plain requests and answers (join and renewal) on the same connection
guard    the walk over frame headers that ends a flood before h2 has parsed it
events   what `Core` reports, and the errors it raises
limits   every bound of a connection, and why it is what it is

`shared.transport` runs a `Core` over a stream of bytes; `shared.tls` makes that stream.
"""
