-- The waiting room: holds a request while no server of its service takes traffic, until the first server does. Only requests
-- come here that found no server, or whose last server refused the connection (haproxy.cfg).
--
-- The action does not sleep. It returns act.YIELD and is called again a moment later, or at once when the client
-- disconnects. HAProxy does not say which of both, and ends an action that yields after a disconnect: then lua.let_go gives
-- the place of the request back.
--
-- The waiting room of a service that is scaled to 0 is closed: it refuses new requests and those that wait, because no
-- request wakes the service. The controller closes and opens it with "set held". In a new worker all of them are open.
--
-- All threads share one state (lua-load, not lua-load-per-thread), so each request is counted once.

local LOOK_MS = 25 -- between two looks at the servers, while few requests are held
local LOOKS_PER_S = 4000 -- of all held requests together: the more there are, the less often each of them looks
local MOST = 4000 -- held at once for all services

local ENDS = {"served", "expired", "left", "refused"}
local rooms = {} -- backend -> {held = now, and the number of requests for each end}
local closed = {} -- backend -> true
local held = 0 -- now, for all services

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

-- A request with fewer bytes than this does not fill its buffer of 16 kB.
local SMALL = 8192

local function now_ms()
  local now = core.now()
  return now.sec * 1000 + now.usec // 1000
end

-- Whether the client has disconnected: the buffer accepts no more bytes although it is not full. Large requests fill it, so
-- this is false for them.
local function has_left(txn)
  return not txn.req:may_recv() and #(txn.f:req_hdrs() or "") + (txn.f:req_body_len() or 0) < SMALL
end

-- How the hold of a request ends now; nil = it does not end. "moved" = a reload has replaced this worker, which gets no new
-- servers: the new worker continues to hold the request.
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

-- The TLV 0xE0 of the connection: "<service> <longest wait in ms> <most at once> <passed> <until>"; see haproxy.cfg.
local function facts_of(txn)
  local service, wait_ms, most, passed, until_ms =
    string.match(txn.f:fc_pp_tlv("0xE0") or "", "^(%S+) (%d+) (%d+) (%d) ?(%S*)$")
  return service, tonumber(wait_ms), tonumber(most), tonumber(passed), tonumber(until_ms)
end

-- Begins to hold a request. False: it is not held, because its service is unknown, its time is over, or no more may wait.
local function begin(txn)
  local service, wait_ms, most, passed, until_ms = facts_of(txn)
  local backend = service and "svc_" .. service
  if backend == nil or core.backends[backend] == nil then
    return false -- a reload has removed its service
  end
  local room = room_of(backend)
  txn:set_var("txn.held_for", service)
  if until_ms and now_ms() >= until_ms then
    room.expired = room.expired + 1
    txn:set_var("txn.hold", "expired")
    return false
  end
  if held >= MOST or room.held >= most then
    room.refused = room.refused + 1
    txn:set_var("txn.hold", "refused")
    return false
  end
  txn:set_var("txn.held_in", backend)
  txn:set_var("txn.held_ms", wait_ms)
  txn:set_var("txn.held_most", most)
  txn:set_var("txn.held_until", until_ms or now_ms() + wait_ms)
  txn:set_var("txn.held_passed", passed)
  room.held = room.held + 1
  held = held + 1
  return true
end

-- http-request lua.hold: sets txn.held_for to the service, and at the end of the hold txn.hold to how it ended.
local function hold(txn)
  if txn:get_var("txn.held_in") == nil and not begin(txn) then
    return act.CONTINUE
  end
  local backend = txn:get_var("txn.held_in")
  local ending = ending_of(txn, backend, txn:get_var("txn.held_until"))
  if ending == nil then
    act.wake_time(math.max(LOOK_MS, held * 1000 // LOOKS_PER_S))
    return act.YIELD
  end
  finish(txn, backend, ending)
  return act.CONTINUE
end

core.register_action("hold", {"http-req"}, hold)

-- http-request lua.let_go: for a request whose client disconnected, after which HAProxy ended lua.hold.
core.register_action("let_go", {"http-req"}, function(txn)
  finish(txn, txn:get_var("txn.held_in"), "left")
end)

-- http-request lua.whole_message(<longest wait in ms>): waits until the gRPC message of txn.message bytes has arrived, or
-- SMALL bytes of it; sets txn.message to "late" where that takes too long.
core.register_action("whole_message", {"http-req"}, function(txn, wait_ms)
  local until_ms = txn:get_var("txn.message_until") or now_ms() + tonumber(wait_ms)
  if txn.f:req_body_len() >= math.min(txn:get_var("txn.message"), SMALL) then
    return act.CONTINUE
  elseif now_ms() >= until_ms or not txn.req:may_recv() then
    txn:set_var("txn.message", "late")
    return act.CONTINUE
  end
  txn:set_var("txn.message_until", until_ms)
  act.wake_time(LOOK_MS)
  return act.YIELD
end, 1)

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

-- lua.named_replica(<backend>): the server that the request names, if there is one and it does not drain; else nothing.
core.register_fetches("named_replica", function(txn, backend)
  local name = txn.f:req_hdr("x-pierhead-replica")
  local server = name and name ~= "hold" and core.backends[backend].servers[name]
  local drains = server and server:is_draining()
  return server and (drains == false or drains == 0) and name or nil
end)
