"""The retail desk: look up users, orders and products; cancel, change, return and exchange orders.

Written from the published policy of the domain and the names and arguments of its tasks' actions. The desk checks what the
policy says that it checks (states of orders, kinds of items, balances); the rest is the agent's responsibility.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from telescope.environments.tasks.tau.desk import Desk, DeskError, Record, find_payment_method, round_to_cents

CancelReason = Literal["no longer needed", "ordered by mistake"]


class RetailDesk(Desk):
    TOOLS: ClassVar[tuple[str, ...]] = (
        "find_user_id_by_email",
        "find_user_id_by_name_zip",
        "get_user_details",
        "get_order_details",
        "get_product_details",
        "list_all_product_types",
        "cancel_pending_order",
        "modify_pending_order_address",
        "modify_pending_order_payment",
        "modify_pending_order_items",
        "modify_user_address",
        "return_delivered_order_items",
        "exchange_delivered_order_items",
        *Desk.TOOLS,
    )

    def find_user_id_by_email(self, email: str) -> str:
        """Find the id of a user by the email address.

        Args:
            email: Such as "someone@example.com".
        """
        for user_id, user in self.records.every("users").items():
            if user["email"].lower() == email.lower():
                return user_id
        raise DeskError(f"there is no user with the email {email!r}")

    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """Find the id of a user by first name, last name and zip code. Prefer the email where the user knows it.

        Args:
            first_name: First name, such as "Ann".
            last_name: Last name, such as "Lee".
            zip: Zip code of the default address, such as "12345".
        """
        wanted = (first_name.lower(), last_name.lower(), zip)
        for user_id, user in self.records.every("users").items():
            name = user["name"]
            if (name["first_name"].lower(), name["last_name"].lower(), user["address"]["zip"]) == wanted:
                return user_id
        raise DeskError("there is no user with this name and zip code")

    def get_user_details(self, user_id: str) -> Record:
        """Get a user's profile: address, email, payment methods and the ids of the orders.

        Args:
            user_id: Such as "ann_lee_1234".
        """
        return self.records.find("users", user_id)

    def get_order_details(self, order_id: str) -> Record:
        """Get an order: its status, items, address and payments.

        Args:
            order_id: With its '#', such as "#W0000000".
        """
        return self.records.find("orders", order_id)

    def get_product_details(self, product_id: str) -> Record:
        """Get a product and all its variants with options, prices and availability.

        Args:
            product_id: The product's id, such as "6086499569"; not the id of an item.
        """
        return self.records.find("products", product_id)

    def list_all_product_types(self) -> dict[str, str]:
        """List the names of all products with their product ids. There are 50 products."""
        products = self.records.every("products")
        return dict(sorted((product["name"], product_id) for product_id, product in products.items()))

    def cancel_pending_order(self, order_id: str, reason: CancelReason) -> Record:
        """Cancel a pending order and refund it. The user has to confirm it explicitly (yes) first.

        Args:
            order_id: With its '#', such as "#W0000000".
            reason: The user's reason; there are no others.
        """
        self._get_pending(order_id)
        order = self.records.edit("orders", order_id)
        refunds = [
            {"transaction_type": "refund", "amount": paid["amount"], "payment_method_id": paid["payment_method_id"]}
            for paid in order["payment_history"]
        ]
        for refund in refunds:
            self._credit_gift_card(order["user_id"], refund["payment_method_id"], refund["amount"])
        order.update(status="cancelled", cancel_reason=reason)
        order["payment_history"].extend(refunds)
        return order

    def modify_pending_order_address(
        self,
        order_id: str,
        address1: str,
        address2: str,
        city: str,
        state: str,
        country: str,
        zip: str,
    ) -> Record:
        """Change the shipping address of a pending order. The user has to confirm it explicitly (yes) first.

        Args:
            order_id: With its '#', such as "#W0000000".
            address1: First line, such as "123 Main Street".
            address2: Second line, such as "Apt 1", or "".
            city: Such as "San Francisco".
            state: Such as "CA".
            country: Such as "USA".
            zip: Such as "12345".
        """
        self._get_pending(order_id)
        order = self.records.edit("orders", order_id)
        order["address"] = _address(address1, address2, city, state, country, zip)
        return order

    def modify_user_address(
        self,
        user_id: str,
        address1: str,
        address2: str,
        city: str,
        state: str,
        country: str,
        zip: str,
    ) -> Record:
        """Change the default address of a user. The user has to confirm it explicitly (yes) first.

        Args:
            user_id: Such as "ann_lee_1234".
            address1: First line, such as "123 Main Street".
            address2: Second line, such as "Apt 1", or "".
            city: Such as "San Francisco".
            state: Such as "CA".
            country: Such as "USA".
            zip: Such as "12345".
        """
        user = self.records.edit("users", user_id)
        user["address"] = _address(address1, address2, city, state, country, zip)
        return user

    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> Record:
        """Pay a pending order with another payment method. The user has to confirm it explicitly (yes) first.

        Args:
            order_id: With its '#', such as "#W0000000".
            payment_method_id: A method of the user's profile, such as "gift_card_0000000", not the one of before.
        """
        order = self._get_pending(order_id)
        history = order["payment_history"]
        if len(history) != 1 or history[0]["transaction_type"] != "payment":
            raise DeskError(f"the order {order_id} has more than one payment: its payment can't be changed")
        before, amount = history[0]["payment_method_id"], history[0]["amount"]
        if payment_method_id == before:
            raise DeskError("the new payment method is the one of before")
        self._afford(order["user_id"], payment_method_id, amount)
        changed = self.records.edit("orders", order_id)
        changed["payment_history"].extend(
            [
                {"transaction_type": "payment", "amount": amount, "payment_method_id": payment_method_id},
                {"transaction_type": "refund", "amount": amount, "payment_method_id": before},
            ]
        )
        self._credit_gift_card(order["user_id"], payment_method_id, -amount)
        self._credit_gift_card(order["user_id"], before, amount)
        return changed

    def modify_pending_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> Record:
        """Change items of a pending order to other variants of the same products; only once for an order.

        The user has to confirm it explicitly (yes) first.

        Args:
            order_id: With its '#', such as "#W0000000".
            item_ids: Items to be changed; an id comes as often as it is meant.
            new_item_ids: The new item for each of them, in the same order.
            payment_method_id: Pays or receives the difference in price, such as "gift_card_0000000".
        """
        order = self._get_pending(order_id)
        swaps = self._match_swaps(order, item_ids, new_item_ids)
        difference = round_to_cents(sum(new["price"] - old["price"] for old, new in swaps))
        self._afford(order["user_id"], payment_method_id, difference)
        changed = self.records.edit("orders", order_id)
        for old, new in swaps:
            item = next(item for item in changed["items"] if item["item_id"] == old["item_id"])
            item.update(item_id=new["item_id"], price=new["price"], options=dict(new["options"]))
        kind = "payment" if difference > 0 else "refund"
        changed["payment_history"].append(
            {"transaction_type": kind, "amount": abs(difference), "payment_method_id": payment_method_id}
        )
        changed["status"] = "pending (item modified)"
        self._credit_gift_card(order["user_id"], payment_method_id, -difference)
        return changed

    def return_delivered_order_items(self, order_id: str, item_ids: list[str], payment_method_id: str) -> Record:
        """Return items of a delivered order. The user has to confirm it explicitly (yes) first.

        Args:
            order_id: With its '#', such as "#W0000000".
            item_ids: Items to be returned; an id comes as often as it is meant.
            payment_method_id: Receives the refund: the original payment method or a gift card.
        """
        order = self._get_delivered(order_id)
        method = find_payment_method(self.records.find("users", order["user_id"]), payment_method_id)
        if payment_method_id != order["payment_history"][0]["payment_method_id"] and method["source"] != "gift_card":
            raise DeskError("a refund goes to the original payment method or to a gift card")
        self._check_items(order, item_ids)
        changed = self.records.edit("orders", order_id)
        changed.update(status="return requested", return_items=sorted(item_ids), return_payment_method_id=payment_method_id)
        return changed

    def exchange_delivered_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> Record:
        """Exchange items of a delivered order for other variants of the same products; only once for an order.

        The user has to confirm it explicitly (yes) first.

        Args:
            order_id: With its '#', such as "#W0000000".
            item_ids: Items to be exchanged; an id comes as often as it is meant.
            new_item_ids: The new item for each of them, in the same order.
            payment_method_id: Pays or receives the difference in price, such as "gift_card_0000000".
        """
        order = self._get_delivered(order_id)
        swaps = self._match_swaps(order, item_ids, new_item_ids)
        difference = round_to_cents(sum(new["price"] - old["price"] for old, new in swaps))
        self._afford(order["user_id"], payment_method_id, difference)
        changed = self.records.edit("orders", order_id)
        changed.update(
            status="exchange requested",
            # Which item becomes which is kept, the order in which they were said is not.
            exchange_items=sorted([old["item_id"], new["item_id"]] for old, new in swaps),
            exchange_payment_method_id=payment_method_id,
            exchange_price_difference=difference,
        )
        return changed

    def _get_pending(self, order_id: str) -> Record:
        return self._get_order(order_id, "pending")

    def _get_delivered(self, order_id: str) -> Record:
        return self._get_order(order_id, "delivered")

    def _get_order(self, order_id: str, status: str) -> Record:
        order = self.records.find("orders", order_id)
        if order["status"] != status:
            raise DeskError(f"the order {order_id} is {order['status']}, not {status}")
        return order

    def _check_items(self, order: Record, item_ids: Sequence[str]) -> None:
        have = Counter(item["item_id"] for item in order["items"])
        missing = Counter(item_ids) - have
        if not item_ids or missing:
            raise DeskError(f"the order {order['order_id']} does not have the items {sorted(missing) or 'of an empty list'}")

    def _match_swaps(self, order: Record, item_ids: Sequence[str], new_item_ids: Sequence[str]) -> list[tuple[Record, Record]]:
        """(item of the order, new variant) of each change. Raises `DeskError` where one is impossible."""
        self._check_items(order, item_ids)
        if len(item_ids) != len(new_item_ids):
            raise DeskError(f"{len(item_ids)} items can't become {len(new_item_ids)}: give one new item for each")
        swaps = []
        for item_id, new_id in zip(item_ids, new_item_ids, strict=True):
            item = next(item for item in order["items"] if item["item_id"] == item_id)
            variants = self.records.find("products", item["product_id"])["variants"]
            if new_id not in variants:
                raise DeskError(f"{new_id} is not a variant of the product of {item_id}")
            if not variants[new_id]["available"]:
                raise DeskError(f"{new_id} is not available")
            swaps.append((item, variants[new_id]))
        return swaps

    def _afford(self, user_id: str, payment_id: str, amount: float) -> None:
        method = find_payment_method(self.records.find("users", user_id), payment_id)
        if method["source"] == "gift_card" and method["balance"] < amount:
            raise DeskError(f"{payment_id} has {method['balance']}, which is less than {amount}")

    def _credit_gift_card(self, user_id: str, payment_id: str, amount: float) -> None:
        """Gift cards are settled at once; other methods show it in 5 to 7 business days, which nobody here lives to see."""
        method = self.records.find("users", user_id)["payment_methods"].get(payment_id)
        if method is not None and method["source"] == "gift_card" and amount:
            card = self.records.edit("users", user_id)["payment_methods"][payment_id]
            card["balance"] = round_to_cents(card["balance"] + amount)


def _address(address1: str, address2: str, city: str, state: str, country: str, zip_code: str) -> Mapping[str, Any]:
    return {
        "address1": address1,
        "address2": address2,
        "city": city,
        "state": state,
        "country": country,
        "zip": zip_code,
    }
