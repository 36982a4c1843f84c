"""The airline desk: look up users, reservations and flights; book, change and cancel reservations; send certificates.

Written from the published policy of the domain and the names and arguments of its tasks' actions. As that policy says, the desk
does not judge whether a change or a cancellation is allowed: the agent must. Seats are not counted down by a booking.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BaseModel, Field

from telescope.environments.tasks.tau.desk import Desk, DeskError, Record, find_payment_method

NOW = "2024-05-15T15:00:00"
INSURANCE, BAG = 30, 50  # dollars a passenger, dollars an extra bag
MAX_PASSENGERS = 5
Bags = Annotated[int, Field(ge=0)]
Cabin = Literal["basic_economy", "economy", "business"]


class FlightChoice(BaseModel):
    flight_number: str = Field(description='Such as "HAT001".')
    date: str = Field(description='Such as "2024-05-01".')


class Passenger(BaseModel):
    first_name: str
    last_name: str
    dob: str = Field(description='Date of birth, such as "1990-01-31".')


class Payment(BaseModel):
    payment_id: str = Field(description='A method of the user\'s profile, such as "credit_card_0000000".')
    amount: int = Field(description="Dollars.", ge=0)


class AirlineDesk(Desk):
    TOOLS: ClassVar[tuple[str, ...]] = (
        "get_user_details",
        "get_reservation_details",
        "list_all_airports",
        "search_direct_flight",
        "search_onestop_flight",
        "get_flight_status",
        "book_reservation",
        "cancel_reservation",
        "update_reservation_flights",
        "update_reservation_baggages",
        "update_reservation_passengers",
        "send_certificate",
        *Desk.TOOLS,
    )

    def get_user_details(self, user_id: str) -> Record:
        """Get a user's profile: membership, payment methods, saved passengers and the ids of the reservations.

        Args:
            user_id: Such as "ann_lee_1234".
        """
        return self.records.find("users", user_id)

    def get_reservation_details(self, reservation_id: str) -> Record:
        """Get a reservation: flights, cabin, passengers, baggage, insurance and payments.

        Args:
            reservation_id: Six characters, such as "8JX2WO".
        """
        return self.records.find("reservations", reservation_id)

    def list_all_airports(self) -> list[str]:
        """List the codes of all airports that are flown to."""
        flights = self.records.every("flights").values()
        return sorted({flight[end] for flight in flights for end in ("origin", "destination")})

    def search_direct_flight(self, origin: str, destination: str, date: str) -> list[dict[str, Any]]:
        """Search direct flights with seats between two airports on a day.

        Args:
            origin: Code of the airport, such as "JFK".
            destination: Code of the airport, such as "LAX".
            date: Such as "2024-05-01".
        """
        return [_offer(flight, date) for flight in self._list_flights(date, origin) if flight["destination"] == destination]

    def search_onestop_flight(self, origin: str, destination: str, date: str) -> list[list[dict[str, Any]]]:
        """Search pairs of flights with seats between two airports that need one change of planes.

        Args:
            origin: Code of the airport, such as "JFK".
            destination: Code of the airport, such as "LAX".
            date: Day of the first flight, such as "2024-05-01".
        """
        found = []
        for first in self._list_flights(date, origin):
            if first["destination"] == destination:
                continue
            arrives = first["scheduled_arrival_time_est"]
            day = _day_after(date) if "+1" in arrives else date
            for second in self._list_flights(day, first["destination"]):
                if second["destination"] == destination and second["scheduled_departure_time_est"] >= arrives[:8]:
                    found.append([_offer(first, date), _offer(second, day)])
        return found

    def get_flight_status(self, flight_number: str, date: str) -> str:
        """Get the status of a flight on a day: available, on time, delayed, flying, landed or cancelled.

        Args:
            flight_number: Such as "HAT001".
            date: Such as "2024-05-01".
        """
        return str(self._find_day(flight_number, date)["status"])

    def book_reservation(
        self,
        user_id: str,
        origin: str,
        destination: str,
        flight_type: Literal["round_trip", "one_way"],
        cabin: Cabin,
        flights: list[FlightChoice],
        passengers: list[Passenger],
        payment_methods: list[Payment],
        total_baggages: Bags,
        nonfree_baggages: Bags,
        insurance: Literal["yes", "no"],
    ) -> Record:
        """Book a reservation. The user has to confirm it explicitly (yes) first.

        Args:
            user_id: Such as "ann_lee_1234".
            origin: Code of the airport where the trip begins.
            destination: Code of the airport where it leads.
            flight_type: One way or both.
            cabin: The same for all flights.
            flights: All flights of the trip, in order.
            passengers: At most five.
            payment_methods: What is paid with which method; the amounts make up the whole price.
            total_baggages: All checked bags.
            nonfree_baggages: Those among them that cost $50 each.
            insurance: Travel insurance, $30 for each passenger.
        """
        user = self.records.find("users", user_id)
        if not flights or not 1 <= len(passengers) <= MAX_PASSENGERS:
            raise DeskError(f"a reservation has at least one flight and 1 to {MAX_PASSENGERS} passengers")
        legs = [self._make_leg(flight, cabin, len(passengers)) for flight in flights]
        price = len(passengers) * (sum(leg["price"] for leg in legs) + (INSURANCE if insurance == "yes" else 0))
        _check_payments(user, payment_methods, price + BAG * nonfree_baggages)
        reservation: dict[str, Any] = {
            "user_id": user_id,
            "origin": origin,
            "destination": destination,
            "flight_type": flight_type,
            "cabin": cabin,
            "flights": legs,
            "passengers": [passenger.model_dump() for passenger in passengers],
            "payment_history": [each.model_dump() for each in payment_methods],
            "created_at": NOW,
            "total_baggages": total_baggages,
            "nonfree_baggages": nonfree_baggages,
            "insurance": insurance,
        }
        reservation_id = reservation["reservation_id"] = _name_of(reservation)
        self.records.add("reservations", reservation_id, reservation)
        profile = self.records.edit("users", user_id)
        profile["reservations"].append(reservation_id)
        for each in payment_methods:
            _pay(profile, each.payment_id, each.amount)
        return reservation

    def cancel_reservation(self, reservation_id: str) -> Record:
        """Cancel a whole reservation and refund it. The user has to confirm it explicitly (yes) first.

        Args:
            reservation_id: Such as "ZFA04Y".
        """
        before = self._find_open(reservation_id)
        refunds = [{"payment_id": paid["payment_id"], "amount": -paid["amount"]} for paid in before["payment_history"]]
        reservation = self.records.edit("reservations", reservation_id)
        reservation["payment_history"].extend(refunds)
        reservation["status"] = "cancelled"
        return reservation

    def update_reservation_flights(
        self, reservation_id: str, cabin: Cabin, flights: list[FlightChoice], payment_id: str
    ) -> Record:
        """Change the flights or the cabin of a reservation. The user has to confirm it explicitly (yes) first.

        Args:
            reservation_id: Such as "ZFA04Y".
            cabin: Cabin of all flights from now on.
            flights: All flights of the reservation from now on, those that stay included.
            payment_id: Pays or receives the difference in price: a credit card or gift card of the profile.
        """
        before = self._find_open(reservation_id)
        people = len(before["passengers"])
        if not flights:
            raise DeskError("a reservation has at least one flight")
        kept = {(leg["flight_number"], leg["date"]): leg for leg in before["flights"]}
        legs = []
        for flight in flights:
            old = kept.get((flight.flight_number, flight.date))
            same = old is not None and cabin == before["cabin"]  # a flight that stays keeps its price
            legs.append(dict(old) if same and old is not None else self._make_leg(flight, cabin, people))
        difference = people * (sum(leg["price"] for leg in legs) - sum(leg["price"] for leg in before["flights"]))
        self._settle(before, payment_id, difference)
        reservation = self.records.edit("reservations", reservation_id)
        reservation.update(flights=legs, cabin=cabin)
        return reservation

    def update_reservation_baggages(
        self, reservation_id: str, total_baggages: Bags, nonfree_baggages: Bags, payment_id: str
    ) -> Record:
        """Add checked bags to a reservation. The user has to confirm it explicitly (yes) first.

        Args:
            reservation_id: Such as "ZFA04Y".
            total_baggages: All checked bags from now on.
            nonfree_baggages: Those among them that cost $50 each.
            payment_id: Pays for them: a credit card or gift card of the profile.
        """
        before = self._find_open(reservation_id)
        self._settle(before, payment_id, BAG * max(0, nonfree_baggages - before["nonfree_baggages"]))
        reservation = self.records.edit("reservations", reservation_id)
        reservation.update(total_baggages=total_baggages, nonfree_baggages=nonfree_baggages)
        return reservation

    def update_reservation_passengers(self, reservation_id: str, passengers: list[Passenger]) -> Record:
        """Change who travels, not how many. The user has to confirm it explicitly (yes) first.

        Args:
            reservation_id: Such as "ZFA04Y".
            passengers: All passengers from now on.
        """
        before = self._find_open(reservation_id)
        if len(passengers) != len(before["passengers"]):
            raise DeskError(f"the reservation is for {len(before['passengers'])} passengers, and so it stays")
        reservation = self.records.edit("reservations", reservation_id)
        reservation["passengers"] = [passenger.model_dump() for passenger in passengers]
        return reservation

    def send_certificate(self, user_id: str, amount: int) -> str:
        """Send a travel certificate to a user. Not to be offered unasked.

        Args:
            user_id: Such as "ann_lee_1234".
            amount: Its worth in dollars.
        """
        if amount < 1:
            raise DeskError("a certificate is worth at least one dollar")
        methods = self.records.edit("users", user_id)["payment_methods"]
        number = 1 + sum(name.startswith("certificate_new_") for name in methods)
        name = f"certificate_new_{number}"
        methods[name] = {"source": "certificate", "id": name, "amount": amount}
        return f"{name} over {amount} dollars was sent to {user_id}"

    def _find_open(self, reservation_id: str) -> Record:
        reservation = self.records.find("reservations", reservation_id)
        if reservation.get("status") == "cancelled":
            raise DeskError(f"the reservation {reservation_id} is cancelled")
        return reservation

    def _find_day(self, flight_number: str, date: str) -> Mapping[str, Any]:
        day: Mapping[str, Any] | None = self.records.find("flights", flight_number)["dates"].get(date)
        if day is None:
            raise DeskError(f"{flight_number} does not fly on {date}")
        return day

    def _make_leg(self, flight: FlightChoice, cabin: str, people: int) -> dict[str, Any]:
        """A flight as a reservation has it, at today's price. Raises `DeskError` where it can't be booked."""
        day = self._find_day(flight.flight_number, flight.date)
        if day["status"] != "available":
            raise DeskError(f"{flight.flight_number} on {flight.date} is {day['status']}: it can't be booked")
        if day["available_seats"][cabin] < people:
            raise DeskError(f"{flight.flight_number} on {flight.date} has {day['available_seats'][cabin]} seats in {cabin}")
        plan = self.records.find("flights", flight.flight_number)
        ends = {"origin": plan["origin"], "destination": plan["destination"]}
        return {**ends, "flight_number": flight.flight_number, "date": flight.date, "price": day["prices"][cabin]}

    def _list_flights(self, date: str, origin: str) -> Iterator[Record]:
        for flight in self.records.every("flights").values():
            if flight["origin"] == origin and flight["dates"].get(date, {}).get("status") == "available":
                yield flight

    def _settle(self, reservation: Record, payment_id: str, amount: int) -> None:
        """Pay or refund a difference. Raises `DeskError` before anything has changed."""
        user = self.records.find("users", reservation["user_id"])
        if find_payment_method(user, payment_id)["source"] == "certificate":
            raise DeskError("a change is paid with a credit card or a gift card, not with a certificate")
        _afford(user, payment_id, amount)
        if amount:
            history = self.records.edit("reservations", reservation["reservation_id"])["payment_history"]
            history.append({"payment_id": payment_id, "amount": amount})
            _pay(self.records.edit("users", reservation["user_id"]), payment_id, amount)


def _offer(flight: Record, date: str) -> dict[str, Any]:
    day = flight["dates"][date]
    return {
        **{key: value for key, value in flight.items() if key != "dates"},
        "date": date,
        "available_seats": day["available_seats"],
        "prices": day["prices"],
    }


def _day_after(date: str) -> str:
    return (datetime.date.fromisoformat(date) + datetime.timedelta(days=1)).isoformat()


def _name_of(reservation: Record) -> str:
    """By what it is: whoever books the same in another order ends in the same state."""
    named = hashlib.sha256(orjson.dumps(reservation, option=orjson.OPT_SORT_KEYS)).hexdigest()
    return f"N{named[:6].upper()}"


def _check_payments(user: Record, payments: list[Payment], price: int) -> None:
    """Together they are the price, each method is named once, and has what it is to give."""
    paid = sum(each.amount for each in payments)
    if paid != price:
        raise DeskError(f"the price is {price} dollars, the payments make {paid}")
    if len({each.payment_id for each in payments}) != len(payments):
        raise DeskError("a payment method is named twice: name it once with the whole amount")
    for each in payments:
        _afford(user, each.payment_id, each.amount)


def _afford(user: Record, payment_id: str, amount: int) -> None:
    method = find_payment_method(user, payment_id)
    have = method.get("amount")
    if method["source"] in ("gift_card", "certificate") and have is not None and have < amount:
        raise DeskError(f"{payment_id} has {have} dollars, which is less than {amount}")


def _pay(profile: dict[str, Any], payment_id: str, amount: int) -> None:
    """A gift card is charged (or credited), a certificate is used up."""
    method = profile["payment_methods"][payment_id]
    if method["source"] == "gift_card":
        method["amount"] -= amount
    elif method["source"] == "certificate":
        del profile["payment_methods"][payment_id]
