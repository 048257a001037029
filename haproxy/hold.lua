-- The waiting room: holds a request while no server of its service takes traffic, and lets it go on with the first that
-- does. See haproxy.cfg: only requests that found no server come here, so with one nothing of this runs.
--
-- The action does not sleep. It answers act.YIELD and is asked again a moment later, or at once when the request's client
-- goes away. HAProxy does not tell which, and ends an action that goes on waiting then: lua.let_go gives its place back.
--
-- A waiting room that is closed lets nobody in, and those that wait go: the service shall have no server, and no request
-- wakes it. The controller closes and opens it with "set held"; a worker begins with all of them open.
--
-- All threads share one state (lua-load, not lua-load-per-thread): what is counted here is counted once.

local LOOK_MS = 25 -- between two looks at the servers, while few are held
local LOOKS_PER_S = 4000 -- by all that are held together: with more of them each looks less often
local MOST = 4000 -- held at once for all services

local ENDS = {"served", "expired", "left", "refused"}
local rooms = {} -- backend -> {held = now, and how many ended in which way}
local closed = {} -- backend -> true
local held = 0 -- now, for all of them

local function room_of(backend)
  local room = rooms[backend]
  if room == nil then
    room = {held = 0}
    for _, ending in ipairs(ENDS) do
      room[ending] = 0
    end
    rooms[backend] = room
  end
  return room
end

-- Below this many bytes of a request its buffer is far from full (it takes 16 kB).
local SMALL = 8192

local function now_ms()
  local now = core.now()
  return now.sec * 1000 + now.usec // 1000
end

-- Whether the client went away. Only of a small request it is known: the channel takes no more, and is not full.
local function has_left(txn)
  return not txn.req:may_recv() and #(txn.f:req_hdrs() or "") + (txn.f:req_body_len() or 0) < SMALL
end

-- What becomes of a request now; nil = it is held on. "moved" = this worker was replaced by a reload, and is told of no
-- server any more: the new one goes on holding.
local function ending_of(txn, backend, until_ms)
  if core.backends[backend]:get_srv_act() > 0 then
    return "served"
  elseif has_left(txn) then
    return "left"
  elseif txn.f:stopping() == 1 then
    return "moved"
  elseif closed[backend] then
    return "closed"
  elseif now_ms() >= until_ms then
    return "expired"
  end
  return nil
end

local function finish(txn, backend, ending)
  local room = room_of(backend)
  room.held = room.held - 1
  held = held - 1
  if ending == "closed" then
    room.refused = room.refused + 1
  elseif ending ~= "moved" then -- the new worker counts it
    room[ending] = room[ending] + 1
  end
  txn:set_var("txn.hold", ending)
end

-- http-request lua.hold: the header x-pierhead-hold says "<service> <until, ms since the epoch> <most at once>". Sets
-- txn.held_for to the service, and when it is over txn.hold to how it ended.
local function hold(txn)
  local backend = txn:get_var("txn.held_in")
  if backend == nil then
    local service, until_ms, most = string.match(txn.f:req_fhdr("x-pierhead-hold") or "", "^(%S+) (%d+) (%d+)$")
    backend = service and "svc_" .. service
    if backend == nil or core.backends[backend] == nil then
      return act.CONTINUE -- a reload took its service away
    end
    local room = room_of(backend)
    txn:set_var("txn.held_for", service)
    if held >= MOST or room.held >= tonumber(most) then
      room.refused = room.refused + 1
      txn:set_var("txn.hold", "refused")
      return act.CONTINUE
    end
    txn:set_var("txn.held_in", backend)
    txn:set_var("txn.held_until", tonumber(until_ms))
    room.held = room.held + 1
    held = held + 1
  end
  local ending = ending_of(txn, backend, txn:get_var("txn.held_until"))
  if ending == nil then
    act.wake_time(math.max(LOOK_MS, held * 1000 // LOOKS_PER_S))
    return act.YIELD
  end
  finish(txn, backend, ending)
  return act.CONTINUE
end

core.register_action("hold", {"http-req"}, hold)

-- http-request lua.let_go: for a request that lua.hold was not allowed to go on with.
core.register_action("let_go", {"http-req"}, function(txn)
  finish(txn, txn:get_var("txn.held_in"), "left")
end)

core.register_cli({"show", "held"}, "show held : requests that wait for a first server, by backend", function(applet)
  applet:send("# backend held " .. table.concat(ENDS, " ") .. " closed\n")
  for backend, room in pairs(rooms) do
    local numbers = {room.held}
    for _, ending in ipairs(ENDS) do
      numbers[#numbers + 1] = room[ending]
    end
    numbers[#numbers + 1] = closed[backend] and 1 or 0
    applet:send(backend .. " " .. table.concat(numbers, " ") .. "\n")
  end
end)

core.register_cli({"set", "held"}, "set held <backend> open|closed : whether requests may wait for a first server",
  function(applet, _, _, backend, state)
    if core.backends[backend] == nil then
      applet:send("No such backend.\n")
    elseif state ~= "open" and state ~= "closed" then
      applet:send("Expected open or closed.\n")
    else
      room_of(backend)
      closed[backend] = state == "closed" or nil
    end
  end)

-- lua.waiting_room(<backend>): "open" or "closed".
core.register_fetches("waiting_room", function(_, backend)
  return closed[backend] and "closed" or "open"
end)
