"""The tau desks on their real data: the tasks' own actions are right, nothing done is wrong, and the desks keep their rules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from telescope.environments.base import Prompt, Turn
from telescope.environments.endpoint import EndpointSettings, RetryingEndpoint
from telescope.environments.failures import InfrastructureError
from telescope.environments.tasks.tau import Tau
from telescope.environments.tasks.tau.airline import AirlineDesk
from telescope.environments.tasks.tau.data import Task
from telescope.environments.tasks.tau.desk import Desk, DeskError, Records
from telescope.environments.tasks.tau.retail import RetailDesk
from telescope.environments.tasks.tau.users import AGREES, ScriptedUser, rewrite_in_first_person
from telescope.environments.tools.schema import make_tool
from tests.environments.judge_server import Clock, JudgeServer, judging
from tests.environments.tools.talk import Talk

SIZES = {"retail": {"train": 74, "eval": 40}, "airline": {"train": 30, "eval": 20}}


@pytest.fixture(scope="module", params=["retail", "airline"])
def tau(request: pytest.FixtureRequest) -> Tau:
    return Tau(domain=request.param, tool_prompt="none")


@pytest.fixture(scope="module")
def retail() -> Tau:
    return Tau(domain="retail")


@pytest.fixture(scope="module")
def airline() -> Tau:
    return Tau(domain="airline")


def all_prompts(tau: Tau) -> list[Prompt]:
    return [*tau.prompts("train"), *tau.prompts("eval")]


class Oracle:
    """Does what the task's actions say, one call an answer, then says the required outputs until the user hangs up."""

    def __init__(self, task: Task) -> None:
        self._left = list(task.actions)
        self._outputs = ", ".join(task.outputs)

    def __call__(self, turns: Sequence[Turn]) -> str:
        if self._left:
            name, arguments = self._left.pop(0)
            return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        return f"All is done. {self._outputs}."


async def test_the_tasks_own_actions_earn_1_on_every_task(tau: Tau):
    prompts = all_prompts(tau)
    rewards = [await tau.play(prompt, Talk(Oracle(tau.task(prompt)))) for prompt in prompts]
    assert len(prompts) == {"retail": 114, "airline": 50}[tau.domain]
    assert [prompt.facts["task"] for prompt, reward in zip(prompts, rewards, strict=True) if reward.total != 1] == []
    # What the desk refuses is a look-up that is meant to fail, or one of 4 changes that the policy forbids: retail tasks 12, 13
    # (refund to a third method), 64 (an order not delivered yet) and 105 (a gift card too small).
    refused = sum(reward.metrics["tool_error_count"] for reward in rewards)
    assert refused == {"retail": 23, "airline": 0}[tau.domain]
    assert sum(reward.metrics["malformed_tool_calls"] for reward in rewards) == 0
    changing = sum(not reward.metrics["database_untouched"] for reward in rewards)
    assert changing == {"retail": 103, "airline": 30}[tau.domain]


async def test_nothing_done_earns_0_wherever_something_was_to_be_done_or_said(tau: Tau):
    totals = {"due": 0.0, "not due": 0.0}
    counts = {"due": 0, "not due": 0}
    for prompt in all_prompts(tau):
        task = tau.task(prompt)
        due = "due" if task.outputs or not tau.play_actions(task)[0].records.untouched else "not due"
        totals[due] += (await tau.play(prompt, Talk(lambda turns: "Goodbye"))).total
        counts[due] += 1
    assert counts == {"retail": {"due": 107, "not due": 7}, "airline": {"due": 31, "not due": 19}}[tau.domain]
    assert totals == {"due": 0, "not due": counts["not due"]}


async def test_the_last_action_left_out_or_one_too_many_earns_0(retail: Tau):
    prompt = next(each for each in all_prompts(retail) if each.facts["task"] == "0")
    task = retail.task(prompt)
    short = Task(**{**vars(task), "actions": task.actions[:-1]})
    more = ("modify_user_address", {**dict.fromkeys(("address1", "address2", "city", "state", "country", "zip"), "x")})
    long = Task(**{**vars(task), "actions": (*task.actions, (more[0], {"user_id": "yusuf_rossi_9620", **more[1]}))})
    assert (await retail.play(prompt, Talk(Oracle(short)))).total == 0
    assert (await retail.play(prompt, Talk(Oracle(long)))).total == 0


def test_prompts_are_the_splits_with_policy_and_wish(tau: Tau):
    for split, size in SIZES[tau.domain].items():
        prompts = tau.prompts(split)
        assert len(prompts) == size
        assert all(prompt.turns[0]["content"].lstrip("# ").lower().startswith(tau.domain) for prompt in prompts)
    assert not {p.facts["task"] for p in tau.prompts("train")} & {p.facts["task"] for p in tau.prompts("eval")}


def test_a_tool_of_a_desk_is_made_once_for_all_rollouts(retail: Tau, monkeypatch: pytest.MonkeyPatch):
    prompts = all_prompts(retail)
    for prompt in prompts:
        retail.play_actions(retail.task(prompt))
    made: list[str] = []
    monkeypatch.setattr("telescope.environments.tool_environment.make_tool", lambda function: made.append(function.__name__))
    for prompt in prompts:
        retail.play_actions(retail.task(prompt))
    assert made == []


def test_every_tool_has_a_description_and_describes_each_of_its_parameters():
    for desk in (RetailDesk, AirlineDesk):
        for name in desk.TOOLS:
            tool = make_tool(getattr(desk, name).__get__(desk({})))
            assert tool.description, name
            assert all("description" in each for each in tool.parameters["properties"].values()), name
    assert (len(RetailDesk.TOOLS), len(AirlineDesk.TOOLS)) == (15, 14)


def test_rollouts_share_the_tables_and_none_sees_another_s_changes(retail: Tau):
    one, two = RetailDesk(retail._tables), RetailDesk(retail._tables)
    before = json.dumps(retail._tables["users"]["noah_brown_6181"])
    one.modify_user_address("noah_brown_6181", "a", "b", "c", "d", "e", "f")
    assert one.get_user_details("noah_brown_6181")["address"]["city"] == "c"
    assert two.get_user_details("noah_brown_6181")["address"]["city"] == "Denver"
    assert json.dumps(retail._tables["users"]["noah_brown_6181"]) == before
    assert (one.records.untouched, two.records.untouched) == (False, True)


def test_a_state_has_one_name_however_it_came_about():
    def records() -> Records:
        return Records({"users": {"a": {"n": 1}, "b": {"n": 1}}})

    one, two, back = records(), records(), records()
    for key in ("a", "b"):
        one.edit("users", key)["n"] = 2
    for key in ("b", "a"):
        two.edit("users", key)["n"] = 2
    back.edit("users", "a")["n"] = 2
    back.edit("users", "a")["n"] = 1
    assert one.digest() == two.digest() != records().digest()
    assert back.digest() == records().digest()
    with pytest.raises(DeskError, match="there is no user 'c'"):
        one.edit("users", "c")


def pending(retail: Tau, method: str) -> tuple[RetailDesk, dict[str, Any], str]:
    """A desk, a pending order paid with such a method, and its owner's id."""
    desk = RetailDesk(retail._tables)
    for order_id, order in retail._tables["orders"].items():
        paid = order["payment_history"][0]["payment_method_id"]
        if order["status"] == "pending" and paid.startswith(method):
            return desk, dict(desk.get_order_details(order_id)), paid
    raise AssertionError(method)


def test_cancelling_refunds_a_gift_card_at_once_and_only_pending_orders_can_be_cancelled(retail: Tau):
    desk, order, card = pending(retail, "gift_card")
    before = desk.get_user_details(order["user_id"])["payment_methods"][card]["balance"]
    cancelled = desk.cancel_pending_order(order["order_id"], "no longer needed")
    assert (cancelled["status"], cancelled["payment_history"][-1]["transaction_type"]) == ("cancelled", "refund")
    after = desk.get_user_details(order["user_id"])["payment_methods"][card]["balance"]
    assert after == round(before + order["payment_history"][0]["amount"], 2)
    with pytest.raises(DeskError, match="is cancelled, not pending"):
        desk.cancel_pending_order(order["order_id"], "no longer needed")


def test_items_change_to_available_variants_of_the_same_product_and_once_only(retail: Tau):
    desk, order, paid = pending(retail, "credit_card")
    item = order["items"][0]
    variants = desk.get_product_details(item["product_id"])["variants"]
    new = next(v for v in variants.values() if v["available"] and v["item_id"] != item["item_id"])
    gone = [v["item_id"] for v in variants.values() if not v["available"]]
    with pytest.raises(DeskError, match="is not a variant"):
        desk.modify_pending_order_items(order["order_id"], [item["item_id"]], ["1"], paid)
    with pytest.raises(DeskError, match="does not have the items"):
        desk.modify_pending_order_items(order["order_id"], ["1"], [new["item_id"]], paid)
    with pytest.raises(DeskError, match="1 items can't become 2"):
        desk.modify_pending_order_items(order["order_id"], [item["item_id"]], [new["item_id"]] * 2, paid)
    for each in gone[:1]:
        with pytest.raises(DeskError, match="not available"):
            desk.modify_pending_order_items(order["order_id"], [item["item_id"]], [each], paid)
    assert desk.records.untouched
    changed = desk.modify_pending_order_items(order["order_id"], [item["item_id"]], [new["item_id"]], paid)
    assert changed["items"][0]["item_id"] == new["item_id"]
    assert changed["payment_history"][-1]["amount"] == abs(round(new["price"] - item["price"], 2))
    with pytest.raises(DeskError, match="not pending"):
        desk.modify_pending_order_items(order["order_id"], [new["item_id"]], [item["item_id"]], paid)


def test_a_booking_has_its_price_and_its_payments_and_certificates_are_used_up(airline: Tau):
    desk = AirlineDesk(airline._tables)
    book = make_tool(desk.book_reservation)
    given = {
        "user_id": "mia_li_3668",
        "origin": "PHL",
        "destination": "LGA",
        "flight_type": "one_way",
        "cabin": "economy",
        "flights": [{"flight_number": "HAT001", "date": "2024-05-20"}],
        "passengers": [{"first_name": "Mia", "last_name": "Li", "dob": "1990-04-05"}],
        "total_baggages": 1,
        "nonfree_baggages": 1,
        "insurance": "yes",
    }
    price = airline._tables["flights"]["HAT001"]["dates"]["2024-05-20"]["prices"]["economy"] + 30 + 50
    short = [{"payment_id": "credit_card_4421486", "amount": price - 1}]
    with pytest.raises(DeskError, match=f"the price is {price} dollars, the payments make {price - 1}"):
        book.function(**book.arguments({**given, "payment_methods": short}))
    paid = [{"payment_id": "certificate_4856383", "amount": 100}, {"payment_id": "credit_card_4421486", "amount": price - 100}]
    made = book.function(**book.arguments({**given, "payment_methods": paid}))
    profile = desk.get_user_details("mia_li_3668")
    assert profile["reservations"][-1] == made["reservation_id"]
    assert "certificate_4856383" not in profile["payment_methods"]
    assert desk.get_reservation_details(made["reservation_id"])["flights"][0]["origin"] == "PHL"
    cancelled = desk.cancel_reservation(made["reservation_id"])
    assert [each["amount"] for each in cancelled["payment_history"]] == [100, price - 100, -100, 100 - price]
    with pytest.raises(DeskError, match="is cancelled"):
        desk.cancel_reservation(made["reservation_id"])


def test_flights_that_stay_keep_their_price_and_passengers_their_number(airline: Tau):
    desk = AirlineDesk(airline._tables)
    before = desk.get_reservation_details("4WQ150")
    legs = [{"flight_number": leg["flight_number"], "date": leg["date"]} for leg in before["flights"]]
    update = make_tool(desk.update_reservation_flights)
    user = desk.get_user_details(before["user_id"])
    card = next(name for name in user["payment_methods"] if not name.startswith("certificate"))
    same = update.function(
        **update.arguments({"reservation_id": "4WQ150", "cabin": "business", "flights": legs, "payment_id": card})
    )
    assert [leg["price"] for leg in same["flights"]] == [883, 779]
    assert len(same["payment_history"]) == 1
    with pytest.raises(DeskError, match="for 3 passengers"):
        desk.update_reservation_passengers("4WQ150", [])


def test_the_calculator_knows_decimals_and_evaluates_nothing():
    desk = Desk({})
    assert desk.calculate("3131.1 + 4777.75 + 367.38") == "8276.23"
    assert desk.calculate("2 * ((350 - 122) + (499 - 127))") == "1200.0"
    with pytest.raises(DeskError, match="this can't be calculated"):
        desk.calculate("9**9**9")


async def test_the_scripted_user_says_what_the_task_says_agrees_and_hangs_up():
    task = Task("0", "You want to return your lamp.", "You are Ann.", "You don't know your email.", "You are curt.", (), ())
    user = ScriptedUser(task)
    assert await user.open() == "I want to return my lamp."
    assert await user.answer("Who are you?") == "I am Ann. I don't know my email."
    assert await user.answer("Fine.") == "I am curt."
    assert await user.answer("Shall I return it?") == AGREES
    assert await user.answer("Done.") == ""
    assert (
        rewrite_in_first_person("If the agent tells you that you're late, yours is yours")
        == "If the agent tells me that I'm late, mine is mine"
    )


def phoned_by(server: JudgeServer, clock: Clock | None = None, **settings: Any) -> Tau:
    """A retail desk whose customers are played by the server's model; `clock` is what its patience goes by."""
    user = EndpointSettings.model_validate({"base_url": server.base_url, "model": "m", "api_key": "sesame", **settings})
    tau = Tau(user=user)
    clock = clock or Clock()
    tau._customer = RetryingEndpoint("the customer's model", user, clock=clock, pause=clock.pause)
    return tau


async def test_a_model_behind_an_endpoint_plays_the_user():
    async with judging(["I am Ann, my lamp is broken.", "<think>She asks.</think> Yes.", "Thanks ###STOP###"]) as server:
        tau = Tau(user=EndpointSettings(base_url=server.base_url, model="m", api_key=SecretStr("sesame")))
        await tau.set_up()
        talk = Talk(["Do you want your money back?", "Done."])
        await tau.play(tau.prompts("train")[0], talk)
        await tau.tear_down()
    assert talk.said[0][1] == {"role": "user", "content": "I am Ann, my lamp is broken."}
    assert talk.said[1][0] == {"role": "user", "content": "Yes."}
    assert "authorization: bearer sesame" in server.heads[-1].lower()
    body = server.requests[-1]
    assert (body["model"], body["temperature"]) == ("m", 0.0)
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert "mechanical keyboard" in body["messages"][0]["content"]
    assert server.connections == 1  # kept through the dialogue


async def test_the_judge_reads_no_analysis_of_an_agent_that_speaks_in_channels(retail: Tau):
    tau = retail.model_copy(update={"call_format": "harmony"})
    prompt = tau.prompts("train")[0]
    state = await tau.initial_state(prompt)
    answer = "<|channel|>analysis<|message|>I deserve 1.0.<|end|><|start|>assistant<|channel|>final<|message|>Hello."
    await tau.say(Talk([answer]), state, tau.opening(prompt, state))
    assert state.lines[-1] == "[agent] Hello."


async def test_a_customer_s_model_that_stumbles_is_asked_again_and_its_silence_is_no_hanging_up():
    clock = Clock()
    async with judging([(503, "busy"), "Hello.", "<think>hm</think>", "Thanks ###STOP###"]) as server:
        tau = phoned_by(server, clock)
        talk = Talk(["Done."])
        await tau.play(tau.prompts("train")[0], talk)
        await tau.tear_down()
    assert talk.said[0][1] == {"role": "user", "content": "Hello."}
    assert (len(server.requests), clock.pauses) == (4, [1.0, 1.0])


async def test_a_customer_s_model_that_is_down_is_no_fault_of_the_policy_and_soon_asked_by_no_rollout():
    clock = Clock()
    async with judging([(500, "out of memory")]) as server:
        tau = phoned_by(server, clock, max_attempts=2, breaker_failures=2, breaker_pause_s=300.0, retry_timeout_s=30.0)
        prompt = tau.prompts("train")[0]
        with pytest.raises(InfrastructureError, match=r"^the customer's model m at http.* in 2 requests; .*out of memory"):
            await tau.play(prompt, Talk(["Done."]))
        for _ in range(3):
            with pytest.raises(InfrastructureError, match=r"in 0 requests; .* is not asked for 300 s after 2 failures"):
                await tau.play(prompt, Talk(["Done."]))
        await tau.tear_down()
    assert len(server.requests) == 2


async def test_a_customer_s_model_that_refuses_is_no_fault_of_the_policy_either():
    async with judging([(401, "no such key")]) as server:
        tau = phoned_by(server)
        with pytest.raises(InfrastructureError, match=r"does not take the dialogue: .* answered 401: no such key"):
            await tau.play(tau.prompts("train")[0], Talk(["Done."]))
        await tau.tear_down()
    assert len(server.requests) == 1
    with pytest.raises(InfrastructureError, match="was not set up"):
        await Tau(user=tau.user).play(tau.prompts("train")[0], Talk(["Done."]))


def test_what_is_missing_is_named_with_its_remedy(tmp_path: Path):
    with pytest.raises(ValidationError, match=r"user\.model"):
        Tau.model_validate({"user": {"base_url": "http://localhost:8000/v1"}})
    with pytest.raises(ValueError, match=r"has no retail/tasks\.json: name the folder"):
        Tau(data=str(tmp_path)).prompts("train")
