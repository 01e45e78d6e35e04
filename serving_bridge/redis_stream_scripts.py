"""The Lua scripts of the record stream: what must happen in the broker at one instant.

Identifiers travel as text ``ms-seq``; a position is the first identifier not yet read. ``allow-oom`` marks what a
full broker must still do, or it could never be emptied.
"""

from __future__ import annotations

APPEND = """#!lua
-- KEYS: stream, writer's mark. ARGV: number of the record, line, lifetime of the mark in seconds.
-- A retry after a lost answer finds its number in the mark. A late first try behind newer records is dropped.
local last = redis.call('GET', KEYS[2])
if last and tonumber(last) >= tonumber(ARGV[1]) then return 0 end
redis.call('XADD', KEYS[1], '*', 'record', ARGV[2])
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[3])
return 1
"""

LOOK = """#!lua flags=no-writes
-- KEYS: stream. ARGV: reader, position, records, bytes to stop after, longest line, head kept of longer ones.
-- Returns {exists, first id, last id, records ever removed, registered, {{id, size or -1, line or head}, ...}}.
local info = redis.pcall('XINFO', 'STREAM', KEYS[1])
if info['err'] then
  if string.find(info['err'], 'no such key', 1, true) then return {0, '', '0-0', 0, 0, {}} end
  return info
end
local state = {}
for i = 1, #info, 2 do state[info[i]] = info[i + 1] end
local registered = 0
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  for i = 1, #group, 2 do
    if group[i] == 'name' and group[i + 1] == ARGV[1] then registered = 1 end
  end
end
local from, limit, budget = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local entries, used = {}, 0
while #entries < limit and used < budget do
  -- One at a time: neither side ever holds more than the budget and one record.
  local entry = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', 1)[1]
  if not entry then break end
  local size, line = -1, ''
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'record' then size, line = #entry[2][i + 1], entry[2][i + 1] end
  end
  if size > tonumber(ARGV[5]) then line = string.sub(line, 1, tonumber(ARGV[6])) end
  used = used + #line
  entries[#entries + 1] = {entry[1], size, line}
  from = '(' .. entry[1]
end
local first = state['first-entry'] and state['first-entry'][1] or ''
return {1, first, state['last-generated-id'], state['entries-added'] - state['length'], registered, entries}
"""

_REGISTRATIONS = """
local function registrations(stream, readers)
  local flat = {}
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if groups['err'] then
    if string.find(groups['err'], 'no such key', 1, true) then return flat end
    return groups
  end
  for _, group in ipairs(groups) do
    local state = {}
    for i = 1, #group, 2 do state[group[i]] = group[i + 1] end
    flat[#flat + 1] = state['name']
    flat[#flat + 1] = state['last-delivered-id']
    flat[#flat + 1] = redis.call('HGET', readers, state['name']) or ''
  end
  return flat
end
"""

READERS = f"""#!lua flags=no-writes
-- KEYS: stream, readers. Returns name, last delivered id and keep_from or '' of each reader, flat.
{_REGISTRATIONS}
return registrations(KEYS[1], KEYS[2])
"""

TRIM = f"""#!lua flags=allow-oom
-- KEYS: stream, readers. ARGV: first id to keep, then what READERS returned when that was chosen.
-- Returns how many went, or -1 if a reader has moved or registered since.
{_REGISTRATIONS}
local now = registrations(KEYS[1], KEYS[2])
if #now ~= #ARGV - 1 then return -1 end
for i = 1, #now do
  if now[i] ~= ARGV[i + 1] then return -1 end
end
return redis.call('XTRIM', KEYS[1], 'MINID', '=', ARGV[1])
"""

ANCHOR = """#!lua flags=no-writes
-- KEYS: stream. ARGV: position. Returns the id of the record there, else of the last one before it, or ''.
local entry = redis.call('XREVRANGE', KEYS[1], ARGV[1], '-', 'COUNT', 1)[1]
return entry and entry[1] or ''
"""

OLDEST = """#!lua flags=no-writes
-- KEYS: stream. ARGV: id before which to stop, bytes to find, records to look at.
-- Returns {id of the last of the oldest records that hold so many bytes, or '', the bytes they hold}.
local from, last, bytes, count = '-', '', 0, 0
while bytes < tonumber(ARGV[2]) and count < tonumber(ARGV[3]) do
  local entry = redis.call('XRANGE', KEYS[1], from, '(' .. ARGV[1], 'COUNT', 1)[1]
  if not entry then break end
  for _, text in ipairs(entry[2]) do bytes = bytes + #text end
  last, count, from = entry[1], count + 1, '(' .. entry[1]
end
return {last, bytes}
"""

COMMIT = """#!lua flags=allow-oom
-- KEYS: stream, readers. ARGV: reader, last delivered id, keep_from or ''.
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], ARGV[2], 'MKSTREAM')
if made['err'] then redis.call('XGROUP', 'SETID', KEYS[1], ARGV[1], ARGV[2]) end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
return 1
"""

FORGET = """#!lua flags=allow-oom
-- KEYS: stream, readers. ARGV: reader. Returns how many registrations it had.
local known = redis.call('XGROUP', 'DESTROY', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return known
"""

QUARANTINE = """#!lua flags=allow-oom
-- KEYS: quarantine, counts. ARGV: entries kept, id of the bad entry, kind, bytes, reason, head.
-- Identifiers only grow, so that an entry met again, by whichever reader, is refused here and not counted.
local added = redis.pcall('XADD', KEYS[1], 'MAXLEN', '=', ARGV[1], ARGV[2],
  'kind', ARGV[3], 'bytes', ARGV[4], 'reason', ARGV[5], 'head', ARGV[6])
if type(added) == 'table' and added['err'] then
  if string.find(added['err'], 'equal or smaller', 1, true) then return 0 end
  return added
end
redis.call('HINCRBY', KEYS[2], ARGV[3], 1)
return 1
"""
