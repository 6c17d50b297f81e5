/* Who plans for a worker: two planners, one cache, one worker with one block, of which the cache names one owner.

     cache      sessions, the owner of the worker, its block: FREE -> LEASED -> CACHED or FREE, DRAINING behind a fence
     planners   P and Q: a session each, after it another one; a lease, a plan with it, its result, and back
     worker     its epoch, the owner that it was told, who plans here, who is fenced; one step at a time

     session is over --> fence, next owner --Owner--> worker --ack--> what drained is free
     owner is asked for the worker --nothing is left--> Yielded --> next owner

   A planner whose session is over hears of it late, and plans on until then. Rules, each with its mutant:
     X_FORMER    the worker takes plans of its owner and of nobody else
     X_VOUCHER   who plans shows that the cache vouches for its session
     X_ACKED     what a session held drains until the worker acknowledged the fence against it
     X_LIVES     an owner is replaced when its session is over or when it has yielded, never before
     X_LEFT      Yielded is said when nothing is left,
     X_LOOK      and has no effect where something is left all the same
     X_NAMED     Owner concerns the worker epoch that it names: what was said to the process before is not for this one
     X_RESULT    a result of an earlier session counts for nothing of this one
   -DX_<RULE> takes one away. */

#ifndef SESSIONS
#define SESSIONS 3        /* of both planners together, at most 4 */
#endif
#ifndef ENDS
#define ENDS 1            /* sessions that expire; whoever has one may be slow or dead */
#endif
#ifndef WISHES
#define WISHES 2          /* times that the owner is asked for the worker; each may be withdrawn */
#endif
#ifndef RESTARTS
#define RESTARTS 0        /* of the worker's process, under its old id */
#endif
#ifndef LEASES
#define LEASES 2          /* of both planners together, at most 4 */
#endif
#ifndef FORGED
#define FORGED 0          /* plans of somebody who names the owner's session */
#endif

/* Never assigned: they name the assertion that fails. */
bool O_plan_of_a_former_owner, O_plan_of_a_forged_session, O_replaced_with_something_left,
     I8_found_and_never_written, I9_free_while_used, I9_granted_while_used, I9_step_on_a_free_block,
     I9_step_on_a_block_of_another;

#define P 0
#define Q 1
#define FORGER 2
#define BIT(e) (1 << (e))

/* ---- on the way; each keeps its order, and ends with the process at the worker's end ---- */
#define REGISTERED 1
#define OWNER 2
#define FENCE 3
#define FENCE_LEASE 4
chan to_worker = [6] of { byte, byte, byte };       /* kind, worker epoch, whom it is about */
#define REGISTER 1
#define ACK 2
#define ACK_LEASE 3
chan from_worker = [6] of { byte, byte };
#define ASK 1
#define RELEASE 2
#define PUBLISH 3
#define ABANDON 4
#define YIELDED 5
chan to_cache[2] = [3] of { byte, byte, byte };     /* kind, session, lease or worker epoch */
chan plans[3] = [1] of { byte, byte, byte, bool };  /* session, worker epoch, lease, whether it reads what was found */
chan results[2] = [2] of { byte, byte };            /* session, lease */

/* ---- cache ---- */
byte session[2], minted;               /* epochs that live, 0: none */
byte owner, reg = 1, workers_minted = 1; bool yields;
byte ends = ENDS, wishes = WISHES, lease_count;
#define FREE 0
#define LEASED 1
#define CACHED 2
#define DRAINING 3
byte state, holder, lease;             /* of the block: who has it, under which lease */

/* ---- planners ---- */
byte epoch[2];                         /* session, as far as it knows */
bool news[2];                          /* a list of workers is on its way */
#define NOT_MINE 0
#define MINE 1
#define WANTED 2
byte worker_is[2];
bool asking[2], planned[2], finished[2], hit[2], attached[2];
byte has[2], at[2];                    /* the lease, and the worker epoch that it is on */

/* ---- worker ---- */
byte w_epoch = 1, w_owner, planning, planning_by, restarts = RESTARTS;
byte step, step_of, step_by;           /* lease, session, planner */
byte fenced, fenced_leases, forged = FORGED; bool written;

#define LIVES(e) ((e) && ((e) == session[P] || (e) == session[Q]))
#define USED (step && reg == w_epoch)
#define LEFT(s) ((state == LEASED && holder == session[s]) || (planned[s] && at[s] == reg && epoch[s] == session[s]))
inline set_state(s) { assert(!USED || I9_free_while_used); state = s; holder = 0; lease = 0 }
inline lose_lease(s) { has[s] = 0; at[s] = 0; planned[s] = false; finished[s] = false; hit[s] = false }

/* ================= cache ================= */

inline tell_planners() {
  if :: session[P] -> news[P] = true :: else fi;
  if :: session[Q] -> news[Q] = true :: else fi
}
inline share_out() {
  if
  :: !LIVES(owner) ->
     yields = false;
     if :: session[P] -> owner = session[P]
        :: session[Q] -> owner = session[Q]
        :: !session[P] && !session[Q] -> owner = 0
     fi;
     if :: owner -> to_worker!OWNER(reg, owner) :: else fi
  :: else
  fi;
  tell_planners()
}
inline end_session(s) {
  if
  :: state == LEASED && holder == session[s] ->
#ifdef X_ACKED
     state = FREE; holder = 0; lease = 0
#else
     state = DRAINING
#endif
  :: else
  fi;
  to_worker!FENCE(reg, session[s]);
  session[s] = 0;
  share_out()
}
inline hear(s) {
  to_cache[s]?kind(from, what);
  if
  :: from != session[s] -> if :: kind == ASK && epoch[s] == from -> asking[s] = false :: else fi
  :: from == session[s] && kind == ASK ->
     asking[s] = false;
     if
     :: (state == FREE || state == CACHED) && !yields && lease_count < LEASES ->
        assert(!USED || I9_granted_while_used);
        lease_count++;
        hit[s] = (state == CACHED); has[s] = lease_count; at[s] = reg;
        state = LEASED; holder = from; lease = lease_count
     :: else
     fi
  :: from == session[s] && (kind == RELEASE || kind == PUBLISH) ->
     if :: state == LEASED && lease == what && kind == RELEASE -> set_state(FREE)
        :: state == LEASED && lease == what && kind == PUBLISH -> set_state(CACHED)
        :: else
     fi
  :: from == session[s] && kind == ABANDON ->
     if :: state == LEASED && lease == what -> state = DRAINING; to_worker!FENCE_LEASE(reg, what) :: else fi
  :: from == session[s] && kind == YIELDED ->
     if
     :: (what == reg && owner == from && yields
#ifndef X_LOOK
         && !(state == LEASED && holder == from)
#endif
        ) -> assert(!LEFT(s) || O_replaced_with_something_left);
           owner = 0; share_out()
     :: else
     fi
  fi;
  kind = 0; from = 0; what = 0
}

active proctype Cache() {
  byte kind, from, what;
end: do
  :: atomic { to_cache[P]?[kind, from, what] -> hear(P) }
  :: atomic { to_cache[Q]?[kind, from, what] -> hear(Q) }
  :: atomic { session[P] && ends -> ends--; end_session(P) }
  :: atomic { session[Q] && ends -> ends--; end_session(Q) }
  :: atomic { session[P] && session[Q] && owner && !yields && wishes -> wishes--; yields = true; tell_planners() }
  :: atomic { yields && wishes -> yields = false; tell_planners() }   /* who wanted it is gone */
#ifdef X_LIVES
  :: atomic { session[P] && owner == session[Q] && !yields ->
       assert(!LEFT(Q) || O_replaced_with_something_left); owner = session[P];
       to_worker!OWNER(reg, owner); tell_planners() }
#endif
  :: atomic { from_worker?kind(what) ->
       if
       :: kind == REGISTER ->          /* another process: nothing of the one before can run or be found any more */
          workers_minted++; reg = workers_minted; state = FREE; holder = 0; lease = 0; yields = false;
          if :: LIVES(owner) -> to_worker!REGISTERED(reg, owner) :: else -> to_worker!REGISTERED(reg, 0) fi;
          share_out()
       :: kind == ACK -> if :: state == DRAINING && holder == what -> set_state(FREE) :: else fi
       :: kind == ACK_LEASE -> if :: state == DRAINING && lease == what -> set_state(FREE) :: else fi
       fi;
       kind = 0; what = 0 }
  od
}

/* ================= a planner ================= */

proctype Planner(byte s) {
  byte from, what; bool is_late;
end: do
  /* its session and the list */
  :: atomic { !epoch[s] && !session[s] && minted < SESSIONS ->
       minted++; epoch[s] = minted; session[s] = minted; share_out() }
  :: atomic { epoch[s] && session[s] != epoch[s] ->     /* it hears that its session is over: all that it had is lost */
       epoch[s] = 0; worker_is[s] = NOT_MINE; attached[s] = false; asking[s] = false; lose_lease(s) }
  :: atomic { news[s] ->
       news[s] = false;
       if
       :: epoch[s] && epoch[s] == session[s] ->
          worker_is[s] = (owner == epoch[s] -> (yields -> WANTED : MINE) : NOT_MINE);
          if :: has[s] && at[s] != reg -> lose_lease(s); attached[s] = false :: else fi;
          if :: worker_is[s] == NOT_MINE -> attached[s] = false :: else fi
       :: else
       fi }

  /* a lease, a plan with it, and back */
  :: atomic { worker_is[s] == MINE && epoch[s] && !has[s] && !asking[s] && nfull(to_cache[s]) && lease_count < LEASES ->
       asking[s] = true; to_cache[s]!ASK(epoch[s], 0) }
  :: atomic { (has[s] && !attached[s] && worker_is[s] != NOT_MINE && at[s] == w_epoch
#ifndef X_FORMER
               && epoch[s] == w_owner
#endif
               && !(fenced & BIT(epoch[s]))) ->
       attached[s] = true; planning = epoch[s]; planning_by = s }
  :: atomic { has[s] && attached[s] && !planned[s] && !finished[s] && nfull(plans[s]) ->
       planned[s] = true; plans[s]!epoch[s](at[s], has[s], hit[s]) }
  :: atomic { results[s]?from(what) ->
#ifdef X_RESULT
       is_late = false;
#else
       is_late = (from != epoch[s] || what != has[s]);
#endif
       if :: !is_late && planned[s] -> planned[s] = false; finished[s] = true :: else fi;
       from = 0; what = 0; is_late = false }
  :: atomic { has[s] && !planned[s] && nfull(to_cache[s]) ->
       if :: finished[s] -> to_cache[s]!PUBLISH(epoch[s], has[s]) :: else -> to_cache[s]!RELEASE(epoch[s], has[s]) fi;
       lose_lease(s) }
  :: atomic { has[s] && planned[s] && !attached[s] && nfull(to_cache[s]) ->   /* nobody says whether it runs */
       to_cache[s]!ABANDON(epoch[s], has[s]); lose_lease(s) }

  /* it is asked for the worker */
  :: atomic { (worker_is[s] == WANTED && nfull(to_cache[s])
#ifndef X_LEFT
               && !has[s]
#endif
              ) -> worker_is[s] = MINE; to_cache[s]!YIELDED(epoch[s], reg) }
  od
}
#if FORGED
active proctype Forger() {   /* names the owner's session, and cannot show that it is its own */
end: do
#ifdef X_VOUCHER
  :: atomic { w_owner && planning_by != FORGER -> planning = w_owner; planning_by = FORGER }
#endif
  :: atomic { forged && w_owner && lease -> forged--; plans[FORGER]!w_owner(w_epoch, lease, false) }
  od
}
#endif

/* ================= worker ================= */

inline nobody_plans() { planning = 0; planning_by = 0 }
inline name_owner(e) {
  if :: e && e != w_owner -> fenced = 0 :: else fi;   /* nobody but the owner attaches from now on */
  w_owner = e;
#ifndef X_FORMER
  if :: e && planning && planning != e -> nobody_plans() :: else fi
#endif
}
inline apply(by) {
  plans[by]?from(named, what, reads);
  if
  :: named == w_epoch && from == planning && by == planning_by && !(fenced_leases & BIT(what)) ->
     assert(by != FORGER || O_plan_of_a_forged_session);
     assert(from == w_owner || O_plan_of_a_former_owner);
     assert(reg != w_epoch || (state != FREE && state != CACHED) || I9_step_on_a_free_block);
     assert(reg != w_epoch || state != LEASED || lease == what || I9_step_on_a_block_of_another);
     assert(!reads || written || I8_found_and_never_written);
     step = what; step_of = from; step_by = by
  :: else
  fi;
  from = 0; named = 0; what = 0; reads = false
}
active proctype Worker() {
  byte kind, named, from, what; bool reads;
end: do
  :: atomic { !step && nempty(plans[P]) -> apply(P) }
  :: atomic { !step && nempty(plans[Q]) -> apply(Q) }
  :: atomic { !step && nempty(plans[FORGER]) -> apply(FORGER) }
  :: atomic { step && (step_by == FORGER || nfull(results[step_by])) ->
       written = true;
       if :: step_by != FORGER -> results[step_by]!step_of(step) :: else fi;
       step = 0; step_of = 0; step_by = 0 }
  :: atomic { !step && nempty(to_worker) && nfull(from_worker) ->
       to_worker?kind(named, what);
       if
       :: kind == REGISTERED -> w_epoch = named; nobody_plans(); fenced = 0; fenced_leases = 0; w_owner = what
       :: kind == OWNER && named == w_epoch -> name_owner(what)
#ifdef X_NAMED
       :: kind == OWNER && !w_epoch -> w_epoch = named; name_owner(what)
       :: kind == OWNER && named != w_epoch && w_epoch
#else
       :: kind == OWNER && named != w_epoch
#endif
       :: kind == FENCE ->
          fenced = fenced | BIT(what);
          if :: planning == what -> nobody_plans() :: else fi;
          from_worker!ACK(what)
       :: kind == FENCE_LEASE -> fenced_leases = fenced_leases | BIT(what); from_worker!ACK_LEASE(what)
       fi;
       kind = 0; named = 0; what = 0 }
  :: atomic { restarts -> restarts--;   /* what was on its way to the old process, or from it, goes with it */
       w_epoch = 0; w_owner = 0; nobody_plans(); fenced = 0; fenced_leases = 0; written = false;
       step = 0; step_of = 0; step_by = 0; attached[P] = false; attached[Q] = false;
       do :: to_worker?_, _, _ :: empty(to_worker) -> break od;
       do :: from_worker?_, _ :: empty(from_worker) -> break od;
       from_worker!REGISTER(0) }
  od
}
init { atomic { run Planner(P); run Planner(Q) } }
