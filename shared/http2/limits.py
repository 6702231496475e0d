"""The bounds of one HTTP/2 connection, each with its reason.

h2 parses whatever it is given and keeps no account of work: 64 KiB of hostile frames cost it up to
0.3 s. What it does not bound is bounded here; what belongs to the messages (their sizes, the
credits) is in `shared.wire`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shared.wire import INITIAL_CREDITS, MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from shared.wire import Lane

# --- announced in SETTINGS -------------------------------------------------------------------

# Three lanes and a few plain requests; more is not ours.
CONCURRENT_STREAMS_MAX: Final = 8
# Three lanes that are read by nobody hold 48 KiB of the 64 KiB connection window (which HTTP/2 gives
# unasked), so control always has room. 16 KiB over 20 ms is 0.8 MB/s: enough for all but bulk.
STREAM_WINDOW_BYTES: Final = 16 * 1024
# The protocol's smallest maximum. It is also the unit in which lanes take turns.
FRAME_BYTES_MAX: Final = 16 * 1024
# Ours are under 1 KiB; decoded size, so a compression bomb is measured as what it becomes.
HEADER_LIST_BYTES_MAX: Final = 16 * 1024
# h2 remembers how 65,536 streams ended; a session has a handful.
CLOSED_STREAMS_MAX: Final = 64

# --- work and memory that one peer can cause -------------------------------------------------

# One read. Larger reads let one hostile peer hold the loop longer before anything is counted.
READ_BYTES_MAX: Final = 16 * 1024
# A frame costs h2 10 to 130 us, so this is at most about 8 ms of loop. An honest peer stays under:
# its waiting messages share DATA frames, and credits bound how many may wait.
FRAMES_PER_READ_MAX: Final = 64
# Empty messages are five bytes; credits allow 28 that cost one, free ones are a few.
MESSAGES_PER_READ_MAX: Final = 128
# A header block of ours is one frame. HPACK state is shared, so a block cannot be skipped.
CONTINUATIONS_MAX: Final = 4
RATE_PERIOD_S: Final = 10.0
# Frames that carry nothing: PING, SETTINGS, PRIORITY, empty DATA, unknown, and WINDOW_UPDATE that
# our own data did not call for. A busy session has under 20 in ten seconds.
CONTROL_FRAMES_MAX: Final = 200
# Window updates that our own data has earned: one for each KiB sent, and no more saved than this,
# which is what a peer may owe for the windows it has.
WINDOW_UPDATE_EARNED_BYTES: Final = 1024
WINDOW_UPDATES_EARNED_MAX: Final = 256
# DATA under 1 KiB costs as much as a full frame. 1,000 a second is about 3 % of a core.
SMALL_DATA_BYTES: Final = 1024
SMALL_DATA_FRAMES_MAX: Final = 10_000
# HEADERS, PUSH_PROMISE and RST_STREAM frames. A session opens three lanes and closes them; rapid reset
# and its mirror (making us reset) cannot do without HEADERS. A connection is replaced after this
# many rather than trusted for longer.
STREAMS_MAX: Final = 20
STREAMS_PER_PERIOD_MAX: Final = 8
# What h2 has ready to be sent. Only answers to the peer's own frames grow it while the peer does
# not read; what we send ourselves is taken in passes that fit.
OUTBOUND_BYTES_MAX: Final = 64 * 1024 + 32 * 1024

# --- sending ---------------------------------------------------------------------------------

# One pass of the writer: what is queued behind it waits at most this long for its turn.
PASS_BYTES_MAX: Final = 64 * 1024
# Of which bulk, so that a control message sent just after a pass was taken waits for little.
BULK_PASS_BYTES_MAX: Final = 32 * 1024
# Messages that cost no credit and wait for the window: heartbeats, acknowledgements, credits. Each
# answers something that is itself bounded by credit, so more than this is a peer that does not read.
FREE_MESSAGES_MAX: Final = 64

# --- plain requests --------------------------------------------------------------------------

# A join request is a sealed token and a CSR, under 8 KiB; the API's own limit for bodies.
REQUEST_BODY_BYTES_MAX: Final = 64 * 1024
# A certificate chain and a trust bundle are under 16 KiB.
RESPONSE_BODY_BYTES_MAX: Final = 256 * 1024
# At once on one connection: before a certificate is seen, memory is what a stranger may use.
REQUESTS_MAX: Final = 2


def queue_messages_max(lane: Lane) -> int:
    """How many messages that cost credit may wait: as many again as the peer may have to hold."""
    return INITIAL_CREDITS[lane]


def free_bytes_max(lane: Lane) -> int:
    """Bytes of free messages that may wait to be sent, or be held unreleased: one handled, one arriving."""
    return 2 * (MESSAGE_BYTES_MAX[lane] + 5)
