"""The scripts that the Redis journal runs on its server, each whole or not at all.

All of them: KEYS 1 and 2 are owner and writer, ARGV 1 and 2 are the queue's token and how many ms it owns the rest. An
owner whose time is over continues if no other queue took over meanwhile. They answer DONE, or why they did nothing.
"""

DONE, NOT_OWNER, LOST_TAIL = 1, -1, -2

_CHECK = """
local owner = redis.call('GET', KEYS[1])
if not owner and redis.call('GET', KEYS[2]) == ARGV[1] then owner = ARGV[1] end
if owner ~= ARGV[1] then return -1 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
"""
KEEP = _CHECK + "return 1"
UNLINK = _CHECK + "redis.call('UNLINK', ARGV[3]) return 1"

# ARGV 3: a dead owner. Answers who owns it now.
TAKE = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] and owner ~= ARGV[3] then return owner end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[2], ARGV[1])
return ARGV[1]
"""
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"

# The number of the newest transition, which a stream keeps when it is trimmed; 0 without a stream.
_LAST = """
local last = 0
local info = redis.pcall('XINFO', 'STREAM', KEYS[3])
for i = 1, #info, 2 do
  if info[i] == 'last-generated-id' then last = tonumber(string.match(info[i + 1], '-(%d+)$')) end
end
"""

# KEYS: transitions. Answers the number of the newest one.
LAST = _CHECK + _LAST + "return last"

# KEYS: transitions, places. ARGV: sequence number, n, n kinds and bodies, m, m freed fields, then fields and places.
# A flush that is repeated because its answer was lost changes nothing. One that does not continue the stream, because
# the server lost its end, would leave a hole.
FLUSH = (
    _CHECK
    + _LAST
    + """
local seq, n = tonumber(ARGV[3]), tonumber(ARGV[4])
if n > 0 and last == seq + n then return 1 end
if last ~= seq then return -2 end
local at = 5
for i = 1, n do
  redis.call('XADD', KEYS[3], '0-' .. string.format('%d', seq + i), 'kind', ARGV[at], 'body', ARGV[at + 1])
  at = at + 2
end
local m = tonumber(ARGV[at])
for i = 1, m do redis.call('HDEL', KEYS[4], ARGV[at + i]) end
for i = at + m + 1, #ARGV, 2 do redis.call('HSET', KEYS[4], ARGV[i], ARGV[i + 1]) end
return 1
"""
)

# KEYS: transitions, dump. ARGV: sequence number, the dump.
COMPACT = (
    _CHECK
    + _LAST
    + """
if last ~= tonumber(ARGV[3]) then return -2 end
redis.call('SET', KEYS[4], ARGV[4])
redis.call('XTRIM', KEYS[3], 'MAXLEN', 0)
return 1
"""
)
